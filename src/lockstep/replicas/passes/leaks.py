"""Notice a model that computes with its own parameters, beside those of the replica that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch
from torch import nn
from torch.autograd.graph import Node

REMEDY: Final = (
    "So does a function kept in the model that calls the model it was made in, as a lambda or a replaced "
    "`forward` may: make it a method."
)


def check_no_leaked_graphs(outputs: Iterable[torch.Tensor], parameters: Mapping[int, str]) -> None:
    """Refuse outputs of a replica whose graph leads to the model's own parameters.

    It does where a function that is kept in the model calls the module that it was made in. Backward would
    bring those gradients past the replicas, in whatever order threads come by.

    Args:
        outputs: Of one shard, computed from inputs that begin a graph of their own.
        parameters: The names of the model's parameters by ``id``.

    Raises:
        ValueError: One is reached.
    """
    reached = {id(leaf) for leaf in _leaves([each.grad_fn for each in outputs])}
    names = [name for each, name in parameters.items() if each in reached]
    if names:
        raise ValueError(
            f"`model` must compute with its copy's parameters, got a replica that uses {names[0]!r} of your "
            f"own model. {REMEDY}"
        )


def check_no_leaked_gradients(parameters: Mapping[str, nn.Parameter], wanted: Collection[int] | None) -> None:
    """Refuse gradients that backward has put into the model's own parameters, past the replicas.

    They come of a loss that is computed with the model itself, in part or whole. No shard's sum holds them,
    so that part of the loss would be lost without a word.

    Args:
        parameters: By name. Gradients found are taken out.
        wanted: Those of them, by ``id``, that had no gradient before the shards were computed; None for all.

    Raises:
        ValueError: A parameter has a gradient.
    """
    stray = None
    for name, parameter in parameters.items():
        if parameter.grad is not None and (wanted is None or id(parameter) in wanted):
            parameter.grad = None
            stray = stray or name
    if stray is None:
        return
    raise ValueError(
        "`loss_fn` must compute its loss with the model that it is given, a replica of yours; got one that "
        f"also gives {stray!r} of your own model a gradient. {REMEDY}"
    )


def refuse_accumulate_hook(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a hook that waits for an accumulation of gradients, which replicas do not have.

    Raises:
        ValueError: A parameter has such a hook.
    """
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`model` must have no post-accumulate-grad hooks, got one on {name!r}. A shard's gradient "
                "is not the batch's; use Tensor.register_hook or a hook of the optimizer."
            )


def _leaves(nodes: Iterable[Node | None]) -> list[torch.Tensor]:
    """List the tensors at which a graph begins."""
    leaves: list[torch.Tensor] = []
    pending = [node for node in nodes if node is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]  # torch's gap
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        pending.extend(following)
    return leaves
