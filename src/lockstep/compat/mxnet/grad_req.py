"""Read what MXNet calls ``grad_req`` into what `lockstep.ReplicaGroup` is made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

GradReq: TypeAlias = Literal["write", "add", "null"]
GradReqs: TypeAlias = "GradReq | Sequence[GradReq] | Mapping[str, GradReq]"


class Options(TypedDict):
    """Options of a `ReplicaGroup`."""

    grad_mode: Any
    fixed: list[str]
    input_grads: bool | dict[str, GradReq]


def read_grad_req(
    grad_req: GradReqs,
    *,
    data: Sequence[str],
    parameters: Sequence[str],
    labels: Sequence[str],
    fixed: Sequence[str],
    inputs_need_grad: bool,
) -> Options:
    """Say what becomes of the gradients of parameters and data.

    A word is for all parameters that are not fixed, and for the data if asked for. A list has a word for each
    of data, parameters and labels, and is taken literally. A mapping goes before everything else.

    Args:
        grad_req: A word, words in order, or words by name.
        data: The names of the data.
        parameters: Those of the parameters.
        labels: Those of the labels.
        fixed: Those of parameters without a gradient.
        inputs_need_grad: Whether gradients of the data are asked for.

    Raises:
        ValueError: A list has another length, or a name is unknown.
    """
    if isinstance(grad_req, str):
        return {"grad_mode": grad_req, "fixed": list(fixed), "input_grads": inputs_need_grad}
    words = _by_name(grad_req, [*data, *parameters, *labels])
    literal = not isinstance(grad_req, Mapping)
    others: GradReq = "write" if inputs_need_grad else "null"
    of_data = {name: words.get(name, others) for name in data}
    return {
        "grad_mode": {name: word for name, word in words.items() if name in parameters},
        "fixed": [] if literal else list(fixed),
        "input_grads": of_data if set(of_data.values()) != {"null"} else False,
    }


def _by_name(grad_req: Sequence[GradReq] | Mapping[str, GradReq], names: Sequence[str]) -> dict[str, GradReq]:
    """Give words by name."""
    if not isinstance(grad_req, Mapping):
        if len(grad_req) != len(names):
            raise ValueError(f"`grad_req` must hold a word for each of {list(names)}, got {len(grad_req)} words.")
        return dict(zip(names, grad_req, strict=True))
    unknown = sorted(set(grad_req) - set(names))
    if unknown:
        raise ValueError(f"`grad_req` must name some of {list(names)}, got {unknown}.")
    return dict(grad_req)
