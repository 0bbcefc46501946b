"""Convert MXNet's ``grad_req`` to options of `lockstep.ReplicaGroup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

GradReq: TypeAlias = Literal["write", "add", "null"]
GradReqs: TypeAlias = "GradReq | Sequence[GradReq] | Mapping[str, GradReq]"


class Options(TypedDict):
    """The options of a `ReplicaGroup` that follow from ``grad_req``."""

    grad_mode: Any
    fixed: list[str]
    input_grads: bool | dict[str, GradReq]


def parse_grad_req(
    grad_req: GradReqs,
    *,
    data: Sequence[str],
    parameters: Sequence[str],
    labels: Sequence[str],
    fixed: Sequence[str],
    inputs_need_grad: bool,
) -> Options:
    """Return the options for the gradients of parameters and data.

    A single mode applies to all parameters that are not fixed, and to the data if their gradients are requested. A
    list holds a mode for each of data, parameters and labels, and is taken literally. A mapping takes precedence
    over all other arguments.

    Args:
        grad_req: A mode, a list of modes in order, or a mapping of modes by name.
        data: The names of the data.
        parameters: The names of the parameters.
        labels: The names of the labels.
        fixed: The names of the parameters without a gradient.
        inputs_need_grad: Whether gradients of the data are requested.

    Raises:
        ValueError: If a list has another length, or a name is unknown.
    """
    if isinstance(grad_req, str):
        return {"grad_mode": grad_req, "fixed": list(fixed), "input_grads": inputs_need_grad}
    modes = _modes_by_name(grad_req, [*data, *parameters, *labels])
    literal = not isinstance(grad_req, Mapping)
    default: GradReq = "write" if inputs_need_grad else "null"
    data_modes = {name: modes.get(name, default) for name in data}
    return {
        "grad_mode": {name: mode for name, mode in modes.items() if name in parameters},
        "fixed": [] if literal else list(fixed),
        "input_grads": data_modes if set(data_modes.values()) != {"null"} else False,
    }


def _modes_by_name(grad_req: Sequence[GradReq] | Mapping[str, GradReq], names: Sequence[str]) -> dict[str, GradReq]:
    """Return the modes by name."""
    if not isinstance(grad_req, Mapping):
        if len(grad_req) != len(names):
            raise ValueError(f"`grad_req` must hold one mode for each of {list(names)}, got {len(grad_req)}.")
        return dict(zip(names, grad_req, strict=True))
    unknown = sorted(set(grad_req) - set(names))
    if unknown:
        raise ValueError(f"`grad_req` must name some of {list(names)}, got {unknown}.")
    return dict(grad_req)
