"""Send small gradients inside the control message of each attempt, saving a round trip.

For two ranks this sends as many bytes as a ring does, for more ranks it sends more, and nothing is sent while backward
still runs. So only small gradients are sent this way, and over a network only very small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from lockstep.communicators import Contribution, MessageTable, can_sum_as_pair
from lockstep.tree import PartialSum, Tensors, add_into, total

INLINE_BYTES: Final = 2**20
"""The number of bytes that a rank may send with its message, to all others together, if all are on one machine."""
INLINE_BYTES_OVER_NETWORK: Final = 2**16
"""The same limit over a network. At 1 Gbit/s this many bytes take half a millisecond, about as long as a round trip."""
CACHED_LAYOUTS: Final = 64
"""The number of layouts that are cached, enough for a few kinds of batches."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the partial sums of a rank lie in the body of its message.

    Attributes:
        size: The number of bytes of all partial sums.
        partials: The partial sums as views of the body; empty if they do not fit into it.
        tensors: All tensors of these partial sums, in order.
    """

    size: int
    partials: Sequence[PartialSum]
    tensors: list[torch.Tensor]

    @classmethod
    def of(
        cls, body: torch.Tensor, contribution: Contribution, like: Sequence[torch.Tensor], *, fits: bool
    ) -> PackedLayout:
        """Lay out partial sums end to end in a body.

        Args:
            body: The bytes of the message's body.
            contribution: The description of the partial sums.
            like: Tensors with the shapes, dtypes and devices of the gradients.
            fits: Whether such tensors can be stored end to end as bytes.
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
        layouts: The layout of each rank's body.
        needed: The number of bytes of the largest body.
        dense: Whether all partial sums can be sent as bytes.
        pair: Whether the sum of two ranks is a single addition.
    """

    layouts: Sequence[PackedLayout]
    needed: int
    dense: bool
    pair: bool


class InlineGradients:
    """The memory for the gradients inside the messages of all ranks.

    Its size follows from what all ranks have contributed so far, so all ranks compute the same size.

    Args:
        rank: The index of this rank.
        size: The number of ranks.
        limit: The number of bytes that a rank may send with its message, to all others together.
    """

    def __init__(self, rank: int, size: int, limit: int) -> None:
        self._rank = rank
        self._limit = limit
        self.table = MessageTable(size)
        """The table of bodies, one per rank."""
        self._reset_layouts(())

    def pack(self, partials: Sequence[PartialSum], contribution: Contribution, like: Sequence[torch.Tensor]) -> None:
        """Copy this rank's partial sums into the body of its message, if they fit.

        Args:
            partials: The partial sums.
            contribution: The description of these sums.
            like: Tensors with the shapes, dtypes and devices of the gradients.
        """
        if not self.table.body_bytes or contribution.sparse:
            return
        # The gradients have other shapes now; views for the old ones would write to the wrong places.
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
        """Sum the partial sums of all ranks in the tree's order.

        Args:
            partials: The partial sums of this rank.
            contributions: What each rank contributes.
            like: Tensors with the shapes, dtypes and devices of the result.

        Returns:
            The sums; None if something did not fit. There may be room for it the next time.
        """
        if self._like is not like:
            self._reset_layouts(like)
        received = self._received(contributions)
        if not received.dense:
            return None
        # Decided by what all ranks contribute and not by what this rank has sent, so all ranks take the same branch.
        if received.needed > self.table.body_bytes:
            self._grow_table(received.needed, len(contributions))
            return None
        if received.pair:
            # Addition of two numbers is commutative, so either side may be added to. The own sums are: a body would
            # have to be copied before the next message.
            add_into(partials[0].tensors, received.layouts[1 - self._rank].partials[0].tensors)
            return partials[0].tensors
        return self._sum_in_order(partials, received.layouts, len(like))

    def _sum_in_order(self, partials: Sequence[PartialSum], layouts: Sequence[PackedLayout], count: int) -> Tensors:
        """Sum the partial sums of all ranks, in the order of ranks."""
        sums: list[PartialSum] = []
        for rank, layout in enumerate(layouts):
            copies = [PartialSum(here.shard, list(here.tensors)) for here in layout.partials]
            sums += partials if rank == self._rank else copies
        if not sums:
            return [None] * count
        # Additions take over tensors that have no counterpart, so a result may be a view of a body.
        own = {tensor.data_ptr() for each in partials for tensor in each.tensors if tensor is not None}
        # A body is overwritten by the next message, so results that lie in one are copied.
        return [tensor if tensor is None or tensor.data_ptr() in own else tensor.clone() for tensor in total(sums)]

    def _grow_table(self, needed: int, size: int) -> None:
        """Replace the table by one with larger bodies, if they stay within the limit."""
        if needed * (size - 1) <= self._limit:
            self.table = MessageTable(size, needed)
            self._reset_layouts(self._like)

    def _reset_layouts(self, like: Sequence[torch.Tensor]) -> None:
        """Forget all layouts, and lay out gradients of these shapes in the current table.

        Most layouts are those of the last update, so they are cached.
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
                can_sum_as_pair(contributions, like),
            )

        self._layout, self._received = layout, received


def _can_be_packed(tensors: Sequence[torch.Tensor]) -> bool:
    """Check whether tensors can be stored end to end as bytes on the host."""
    return all(
        tensor.dtype == tensors[0].dtype and tensor.device.type == "cpu" and not tensor.is_sparse for tensor in tensors
    )
