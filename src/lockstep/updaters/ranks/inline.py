"""Send small gradients inside the control message of each attempt, saving a round trip.

For two ranks these are as many bytes as a ring sends, for more ranks more, and none of them is sent while
backward still computes. So only small gradients go this way, and between machines only very small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from lockstep.communicators import Contribution, Table, is_pair
from lockstep.tree import PartialSum, Tensors, add_into, total

INLINE_BYTES: Final = 2**20
"""Bytes that a rank may send with its message, to all others together, if all are on one machine."""
INLINE_BYTES_OVER_NETWORK: Final = 2**16
"""The same over a network: these take half a millisecond at 1 Gbit/s, about what the round trip does."""
CACHED_LAYOUTS: Final = 64
"""How many layouts are remembered: those of a few kinds of batches."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where a rank's partial sums lie in the body of its message.

    Attributes:
        size: Bytes of them all.
        partials: Views of the body; none where they do not fit.
        tensors: All tensors of these, one after the other.
    """

    size: int
    partials: Sequence[PartialSum]
    tensors: list[torch.Tensor]

    @classmethod
    def of(
        cls, body: torch.Tensor, contribution: Contribution, like: Sequence[torch.Tensor], *, fits: bool
    ) -> PackedLayout:
        """Lay partial sums end to end into a body.

        Args:
            body: Bytes.
            contribution: Describes the sums.
            like: Tensors of the shapes, dtypes and devices of the gradients.
            fits: Whether such tensors can be laid end to end as bytes.
        """
        masks = [[bool(mask >> index & 1) for index in range(len(like))] for mask in contribution.present]
        present = [tensor for mask in masks for there, tensor in zip(mask, like, strict=True) if there]
        size = sum(tensor.nbytes for tensor in present)
        if size > body.numel() or not fits:
            return cls(size, (), [])
        flats = torch.split(body[:size].view(like[0].dtype), [tensor.numel() for tensor in present])
        views = [flat.view(tensor.shape) for flat, tensor in zip(flats, present, strict=True)]
        rest = iter(views)
        partials = [
            PartialSum(shard, [next(rest) if there else None for there in mask])
            for shard, mask in zip(contribution.shards, masks, strict=True)
        ]
        return cls(size, partials, views)


@dataclass(frozen=True, slots=True)
class _Received:
    """What all ranks send.

    Attributes:
        layouts: Of each rank.
        needed: Bytes of the largest.
        dense: Whether all of it can be sent as bytes.
        pair: Whether the sum of two ranks is a single addition.
    """

    layouts: Sequence[PackedLayout]
    needed: int
    dense: bool
    pair: bool


class InlineGradients:
    """Memory for the gradients inside the messages of each rank.

    How much room there is follows from what all ranks brought so far, so every rank knows it.

    Args:
        rank: This rank.
        size: How many ranks there are.
        limit: Bytes that a rank may send with its message, to all others together.
    """

    def __init__(self, rank: int, size: int, limit: int) -> None:
        self._rank = rank
        self._limit = limit
        self.table = Table(size)
        """Has a body for each rank."""
        self._reset_layouts(())

    def pack(self, partials: Sequence[PartialSum], contribution: Contribution, like: Sequence[torch.Tensor]) -> None:
        """Put this rank's partial sums into the body of its message, if they fit.

        Args:
            partials: The sums.
            contribution: Describes them.
            like: Tensors of the shapes, dtypes and devices of the gradients.
        """
        if not self.table.room or contribution.sparse:
            return
        if self._like is not like:
            self._reset_layouts(like)
        layout = self._layout(self._rank, contribution)
        if layout.tensors and partials:
            sums = [tensor for each in partials for tensor in each.tensors if tensor is not None]
            torch._foreach_copy_(layout.tensors, sums)

    def sum(
        self,
        partials: Sequence[PartialSum],
        contributions: tuple[Contribution, ...],
        like: Sequence[torch.Tensor],
    ) -> Tensors | None:
        """Add up what has come, in the tree's order.

        Args:
            partials: This rank's own.
            contributions: What each rank brings.
            like: Tensors of the shapes, dtypes and devices of the result.

        Returns:
            The sums; None where something did not fit, for which there may be room the next time.
        """
        if self._like is not like:
            self._reset_layouts(like)
        received = self._received(contributions)
        if not received.dense:
            return None
        if received.needed > self.table.room:
            self._grow_table(received.needed, len(contributions))
            return None
        if received.pair:
            # The bits are the same the other way round, and what is added to is no body, which needs a copy.
            add_into(partials[0].tensors, received.layouts[1 - self._rank].partials[0].tensors)
            return partials[0].tensors
        return self._sum_in_order(partials, received.layouts, len(like))

    def _sum_in_order(self, partials: Sequence[PartialSum], layouts: Sequence[PackedLayout], count: int) -> Tensors:
        """Add up what all ranks bring."""
        sums: list[PartialSum] = []
        for rank, layout in enumerate(layouts):
            copies = [PartialSum(here.shard, list(here.tensors)) for here in layout.partials]
            sums += partials if rank == self._rank else copies
        if not sums:
            return [None] * count
        own = {tensor.data_ptr() for each in partials for tensor in each.tensors if tensor is not None}
        # What lies in a body will be written over.
        return [tensor if tensor is None or tensor.data_ptr() in own else tensor.clone() for tensor in total(sums)]

    def _grow_table(self, needed: int, size: int) -> None:
        if needed * (size - 1) <= self._limit:
            self.table = Table(size, needed)
            self._reset_layouts(self._like)

    def _reset_layouts(self, like: Sequence[torch.Tensor]) -> None:
        """Lay gradients of these shapes out, in the table that there is now.

        Layouts are mostly those of the last update, and remembered.
        """
        self._like, fits = like, _can_be_packed(like)

        @lru_cache(CACHED_LAYOUTS)
        def layout(rank: int, contribution: Contribution) -> PackedLayout:
            return PackedLayout.of(self.table.body(rank), contribution, like, fits=fits)

        @lru_cache(CACHED_LAYOUTS)
        def received(contributions: tuple[Contribution, ...]) -> _Received:
            layouts = [layout(rank, each) for rank, each in enumerate(contributions)]
            return _Received(
                layouts,
                max(each.size for each in layouts),
                fits and not any(each.sparse for each in contributions),
                is_pair(contributions, like),
            )

        self._layout, self._received = layout, received


def _can_be_packed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors can be laid end to end as bytes on the host."""
    return all(
        tensor.dtype == tensors[0].dtype and tensor.device.type == "cpu" and not tensor.is_sparse for tensor in tensors
    )
