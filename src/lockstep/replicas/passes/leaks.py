"""Detect a model that computes with its own parameters in addition to those of the replica that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch
from torch import nn
from torch.autograd.graph import Node

REMEDY: Final = (
    "A lambda or a replaced `forward` that is stored in the model and refers to the original model has the same "
    "effect. Define it as a method instead."
)
"""The end of the error messages, which describes the usual cause."""


def check_no_leaked_graphs(outputs: Iterable[torch.Tensor], parameters: Mapping[int, str]) -> None:
    """Check that the graph of a replica's outputs does not lead to the parameters of the original model.

    It does if a function that is stored in the model calls the original module. Backward would then add gradients there
    from several threads, in an order that varies.

    Args:
        outputs: The outputs of one shard, whose inputs begin a graph of their own.
        parameters: The names of the parameters of the original model by ``id``.

    Raises:
        ValueError: If the graph reaches a parameter.
    """
    reached = {id(leaf) for leaf in _leaves([each.grad_fn for each in outputs])}
    names = [name for each, name in parameters.items() if each in reached]
    if names:
        raise ValueError(
            f"`model` must compute with the parameters of its replica, got a replica that uses {names[0]!r} of your "
            f"original model. {REMEDY}"
        )


def check_no_leaked_gradients(parameters: Mapping[str, nn.Parameter], wanted: Collection[int] | None) -> None:
    """Check that backward did not store gradients in the parameters of the original model.

    It does if a part of the loss is computed with the original model. The sums over shards do not contain such
    gradients, so that part of the loss would be lost without an error.

    Args:
        parameters: The parameters by name. Gradients that are found are removed.
        wanted: The ``id`` of the parameters that had no gradient before the shards were computed, or None for all.

    Raises:
        ValueError: If a parameter has a gradient.
    """
    leaked = None
    for name, parameter in parameters.items():
        if parameter.grad is not None and (wanted is None or id(parameter) in wanted):
            # Removed from all parameters before raising, so that the model is left as it was.
            parameter.grad = None
            leaked = leaked or name
    if leaked is None:
        return
    raise ValueError(
        "`loss_fn` must compute its loss with the model that it is given, which is a replica; got one that "
        f"also gives {leaked!r} of your original model a gradient. {REMEDY}"
    )


def check_no_inner_backward(replica: nn.Module) -> None:
    """Refuse gradients that a forward has left in a replica.

    Args:
        replica: The replica, after a forward.

    Raises:
        ValueError: If a parameter has a gradient.
    """
    for name, parameter in replica.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                "A forward must not call `backward`, whose gradients would be added to those of the loss that it "
                f"returns; got a gradient of {name!r}. For the gradient of an input, as in adversarial training, use "
                "torch.autograd.grad(loss, inputs). To train on several losses return their sum."
            )


def check_no_accumulate_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that no parameter has a hook on the accumulation of its gradient, which replicas do not do for a batch.

    Args:
        parameters: The parameters by name.

    Raises:
        ValueError: If a parameter has such a hook.
    """
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`model` must have no post-accumulate-grad hooks, got one on {name!r}. A shard's gradient "
                "is not that of the batch. Use Tensor.register_hook or an optimizer hook instead."
            )


def _leaves(nodes: Iterable[Node | None]) -> list[torch.Tensor]:
    """List the leaf tensors of a graph.

    Args:
        nodes: The nodes to start from.
    """
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
