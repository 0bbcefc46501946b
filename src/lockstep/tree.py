"""Sum tensors over shards in one fixed binary tree, whoever made them and in however many places.

Floating-point addition rounds, so another order gives other bits. The order here is that of
`lockstep.plan.merges`: shard numbers are the leaves of a binary tree, and two sums are added when the
subtree that holds them both is complete. What is absent (a shard without samples, a parameter that a
shard did not reach) is passed over and never added as zeros.

Additions are explicit and pairwise, the left one in place. A reduction over a stack of tensors would
round by its own order, which depends on sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

Tensors: TypeAlias = list["torch.Tensor | None"]
"""One tensor for each of P parameters or buffers, or None where there is none."""


@dataclass(slots=True)
class PartialSum:
    """A sum over some shards that form part of one subtree.

    Attributes:
        shard: The first shard in it; with the shards of other sums this fixes its place in the tree.
        tensors: The sum, one entry a parameter; None where no shard had one.
    """

    shard: int
    tensors: Tensors


@dataclass(slots=True)
class ShardSum:
    """Sum the shards of one place as they come, holding few partial sums at a time.

    A run of R shards starting at a multiple of a power of two above R holds at most log2(R) + 1
    partial sums; any other run at most twice that.

    Attributes:
        first: The first shard of this place. Subtrees that begin before it are shared with other
            places and left open for `total`.
        partials: The sums made so far, in order of shards.
    """

    first: int = 0
    partials: list[PartialSum] = field(default_factory=list)

    def push(self, shard: int, tensors: Tensors) -> None:
        """Add the tensors of one shard; shards come in ascending order, absent ones not at all.

        Args:
            shard: The shard's number.
            tensors: Owned by the sum from now on, which adds to them in place.
        """
        if len(self.partials) > 1:
            self.settle(shard)
        self.partials.append(PartialSum(shard, tensors))
        if len(self.partials) > 1:
            self.settle(shard + 1)

    def settle(self, following: int) -> None:
        """Add the last two sums while their subtree ends before `following` and begins in this place.

        Args:
            following: No shard before it is still to come, here or elsewhere.
        """
        partials = self.partials
        while len(partials) > 1:
            left, right = partials[-2].shard, partials[-1].shard
            height = subtree_height(left, right)
            begins_here = (left >> height) << height >= self.first
            if not begins_here or height >= subtree_height(right, following):
                return
            add_into(partials[-2].tensors, partials.pop().tensors)


def subtree_height(left: int, right: int) -> int:
    """Give the height of the smallest subtree that holds two shards.

    >>> subtree_height(2, 3), subtree_height(3, 4)
    (1, 3)
    """
    return (left ^ right).bit_length()


def merge_order(shards: Sequence[int]) -> list[tuple[int, int]]:
    """List the additions that sum partial sums into the first of them.

    Args:
        shards: The first shard of each partial sum, ascending; their subtrees do not overlap.

    Returns:
        Pairs ``(into, other)`` of indices into `shards`, to be added one after another.

    >>> merge_order([0, 4, 6])
    [(1, 2), (0, 1)]
    """
    order: list[tuple[int, int]] = []
    open_sums: list[int] = []
    for index, shard in enumerate(shards):
        while len(open_sums) > 1:
            left, right = shards[open_sums[-2]], shards[open_sums[-1]]
            if subtree_height(left, right) >= subtree_height(right, shard):
                break
            order.append((open_sums[-2], open_sums.pop()))
        open_sums.append(index)
    while len(open_sums) > 1:
        order.append((open_sums[-2], open_sums.pop()))
    return order


def total(partials: Sequence[PartialSum]) -> Tensors:
    """Sum partial sums of all places in the tree's order.

    Args:
        partials: In ascending order of shards, all on one device; the left ones are added to in place.

    Returns:
        The sum over all shards, one entry a parameter; None where no shard had one.

    Determinism: the bits depend on which shards were present, and on nothing else.
    """
    if len(partials) == 1:
        return partials[0].tensors
    for into, other in merge_order([partial.shard for partial in partials]):
        add_into(partials[into].tensors, partials[other].tensors)
    return partials[0].tensors


def divide(tensors: Tensors, divisor: float) -> Tensors:
    """Divide in place the tensors that are there, unless by 1.

    As elsewhere in this library by `torch._foreach_div_`: a GPU's `div_` multiplies by the inverse.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if divisor != 1.0 and present:
        torch._foreach_div_(present, divisor)
    return tensors


def add_into(into: Tensors, other: Tensors) -> None:
    """Add tensor by tensor, in place where both are present; a lone one is taken over.

    Args:
        into: Changed in place.
        other: Left untouched, but its tensors may be shared with `into` afterwards.
    """
    pairs = [(left, right) for left, right in zip(into, other, strict=True) if left is not None and right is not None]
    if pairs:
        lefts, rights = zip(*pairs, strict=True)
        torch._foreach_add_(lefts, rights)
    if len(pairs) < len(into):
        into[:] = [right if left is None else left for left, right in zip(into, other, strict=True)]
