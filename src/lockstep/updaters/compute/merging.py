"""Add large gradients to the sums of earlier shards while backward computes the next ones, so that fewer are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import nn

from lockstep.tree import PartialSum, ShardSum

LARGE: Final = 2**18
"""Elements. The call of a hook takes longer than it takes to add a smaller tensor."""


def can_be_merged(parameter: torch.Tensor) -> bool:
    """Return whether it pays to add the gradient of a parameter to the sums during backward.

    Args:
        parameter: The parameter.
    """
    return parameter.numel() >= LARGE and parameter.device.type == "cpu" and parameter.requires_grad


@contextmanager
def on_gradients(
    parameters: Sequence[tuple[int, nn.Parameter]], call: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Call a function with an index and its parameter whenever backward has added to the gradient.

    Args:
        parameters: The parameters, each with its index; those that require no gradient are left out.
        call: The function.
    """
    handles = [
        each.register_post_accumulate_grad_hook(partial(call, index))  # type: ignore[no-untyped-call]  # torch's gap
        for index, each in parameters
        if each.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class GradientMerge:
    """Adds the gradients of one shard to the sums of a device, one parameter after another, and frees them.

    Args:
        sums: The sums of the device, to which the shard is pushed when its backward is over.
        shard: The number of the shard.

    Attributes:
        spoiled: Whether backward has added to a gradient that was merged already, as nested backwards may, so that the
            sum has another order.

    Determinism: the additions are those of `ShardSum.push`, in the same order for every parameter.
    """

    def __init__(self, sums: ShardSum, shard: int) -> None:
        self.spoiled = False
        self._merged: set[int] = set()
        if len(sums.partials) > 1:
            # Complete before the shard begins, as in `push`.
            sums.merge_complete(shard)
        # The sums that are added to when the shard is pushed, from the last to the first.
        self._chain: list[PartialSum] = sums.partials[sums.count_after(shard) - 1 :][::-1]

    @contextmanager
    def merging(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context for the backward of the shard.

        Args:
            parameters: The parameters that may get a gradient, in the order of the sums.
        """
        chosen = enumerate(parameters) if self._chain else ()
        with on_gradients([(index, each) for index, each in chosen if can_be_merged(each)], self._merge):
            yield

    @torch.no_grad()
    def _merge(self, index: int, parameter: torch.Tensor) -> None:
        """Add a gradient to the sums; called by backward."""
        gradient = parameter.grad
        self.spoiled |= index in self._merged
        if gradient is None or gradient.is_sparse or any(_is_sparse(each.tensors[index]) for each in self._chain):
            return
        self._merged.add(index)
        parameter.grad = None
        for each in self._chain:
            left, each.tensors[index] = each.tensors[index], None
            gradient = gradient if left is None else left.add_(gradient)
        self._chain[-1].tensors[index] = gradient


def _is_sparse(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_sparse
