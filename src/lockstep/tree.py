"""Sum tensors over shards in one fixed binary tree, independently of which device or process computed them.

Floating-point addition rounds, so a different order gives different bits. Here shard numbers are the leaves of a binary
tree: at level k, shard i + 2**k is added to shard i for every multiple i of 2**(k + 1). Five shards, for example, are
summed as ((0 + 1) + (2 + 3)) + 4. Two sums are added as soon as the subtree that contains both is complete. An absent
entry (a shard without samples, or a parameter that a shard did not reach) is skipped and never added as zeros.

All additions are explicit and pairwise, and write to the left operand in place. A reduction over a stack of tensors
would round in an order of its own that depends on the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Final, TypeAlias

import torch

Tensors: TypeAlias = list["torch.Tensor | None"]
"""One tensor for each of P parameters or buffers, or None where there is no tensor."""

_PRESENT: Final = functools.partial(is_not, None)


@dataclass(slots=True)
class PartialSum:
    """A sum over some of the shards in one subtree.

    Attributes:
        shard: The number of the first shard in the sum. Together with the first shards of the other sums it determines
            the position in the tree.
        tensors: The sum, with one entry per parameter, which is None if no shard had a tensor for it.
    """

    shard: int
    tensors: Tensors


@dataclass(slots=True)
class ShardSum:
    """Sum the shards of one device as they arrive, holding few partial sums at a time.

    A run of R shards that starts at a multiple of a power of two above R holds at most log2(R) + 1 partial sums, and
    any other run at most twice as many.

    Attributes:
        first: The number of the first shard of this device. Subtrees that begin before it are shared with other devices
            and are left open for `total`.
        partials: The sums so far, in ascending order of shards.
        following: The number after the last shard. What is complete before it has been added.
    """

    first: int = 0
    partials: list[PartialSum] = field(default_factory=list)
    following: int = 0

    def push(self, shard: int, tensors: Tensors) -> None:
        """Add the tensors of one shard.

        Shards must be pushed in ascending order. A shard that is absent is not pushed.

        Args:
            shard: The number of the shard.
            tensors: The tensors of the shard. The sum takes ownership of them and adds to them in place.
        """
        # Merging before the push keeps few tensors alive. It cannot change the bits: this shard is the lowest that is
        # still to come, so every subtree that ends before it is complete.
        if shard > self.following and len(self.partials) > 1:
            self.merge_complete(shard)
        self.partials.append(PartialSum(shard, tensors))
        self.following = shard + 1
        if len(self.partials) > 1:
            self.merge_complete(shard + 1)

    def merge_complete(self, following: int) -> None:
        """Add the last two sums as long as their subtree ends before `following` and begins on this device.

        Args:
            following: The lowest number of a shard that may still arrive, here or on another device.
        """
        partials = self.partials
        while len(partials) > 1:
            left, right = partials[-2].shard, partials[-1].shard
            height = subtree_height(left, right)
            # A subtree that begins before `first` also contains shards of another device, so only `total` may add it.
            begins_here = (left >> height) << height >= self.first
            if not begins_here or height >= subtree_height(right, following):
                return
            add_into(partials[-2].tensors, partials.pop().tensors)

    def count_after(self, shard: int) -> int:
        """Return how many partial sums there are after the push of a shard, which must be the next one.

        Args:
            shard: The number of the shard.
        """
        rehearsal = ShardSum(self.first, [PartialSum(partial.shard, []) for partial in self.partials])
        rehearsal.push(shard, [])
        return len(rehearsal.partials)


def subtree_height(left: int, right: int) -> int:
    """Return the height of the smallest subtree that contains both shards.

    Args:
        left: The number of one shard.
        right: The number of the other shard.

    >>> subtree_height(2, 3), subtree_height(3, 4)
    (1, 3)
    """
    return (left ^ right).bit_length()


def merge_order(shards: Sequence[int]) -> list[tuple[int, int]]:
    """List the additions that sum several partial sums into the first of them.

    Args:
        shards: The number of the first shard of each partial sum, in ascending order. The subtrees of the sums must not
            overlap.

    Returns:
        Pairs ``(into, other)`` of indices into `shards`, in the order in which to add them.

    >>> merge_order([0, 4, 6])
    [(1, 2), (0, 1)]
    """
    order: list[tuple[int, int]] = []
    # A stack of the sums whose subtree is not complete yet. A sum is added to its left neighbor only once their common
    # subtree is lower than the one that the next shard would join, that is, when it is complete.
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
    """Sum the partial sums of all devices in the order of the tree.

    Args:
        partials: The partial sums in ascending order of shards, all on one device. The left operand of each addition is
            changed in place.

    Returns:
        The sum over all shards, with one entry per parameter, which is None if no shard had a tensor for it.

    Determinism: The bits depend only on which shards were present and on their tensors.
    """
    if len(partials) == 1:
        return partials[0].tensors
    for into, other in merge_order([partial.shard for partial in partials]):
        add_into(partials[into].tensors, partials[other].tensors)
    return partials[0].tensors


def add_into(into: Tensors, other: Tensors) -> None:
    """Add two lists of tensors entry by entry.

    Where both entries are present, the addition is in place. Where only the right one is, it is taken over as it is.

    Args:
        into: The tensors to add to. The list and its tensors are changed in place.
        other: The tensors to add. They are not modified, but `into` may share some of them afterwards.
    """
    # The usual case; the loops run in C.
    if into and all(map(_PRESENT, into)) and all(map(_PRESENT, other)):
        torch._foreach_add_(into, other)  # type: ignore[arg-type]  # all are tensors
        return
    pairs = [(left, right) for left, right in zip(into, other, strict=True) if left is not None and right is not None]
    if pairs:
        lefts, rights = zip(*pairs, strict=True)
        torch._foreach_add_(lefts, rights)
    # Adding zeros for an absent entry instead would turn -0.0 into 0.0.
    into[:] = [right if left is None else left for left, right in zip(into, other, strict=True)]
