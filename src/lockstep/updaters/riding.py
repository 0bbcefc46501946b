"""Let small gradients ride in the message by which ranks meet, which saves them a journey.

For two ranks that is as many bytes as a ring would send, for more it is more; so only small ones ride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.communicators import Contribution, Table
from lockstep.communicators.pair import is_pair
from lockstep.tree import PartialSum, Tensors, add_into, total

SMALL: Final = 2**20
"""Bytes that a rank may send with its message, to all others together."""
MEMORY: Final = 64
"""How many seats are remembered: those of a few ranks for a few kinds of batches."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a rank's partial sums are in its room.

    Attributes:
        size: Bytes of them all.
        partials: Views of the room; none where they do not fit.
    """

    size: int
    partials: Sequence[PartialSum]


class Riders:
    """Memory for the gradients that ride with the messages of each rank.

    How much room there is follows from what all ranks brought so far, so every rank knows it.

    Args:
        rank: This rank.
        size: How many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self.table = Table(size)
        """Has a body for each rank."""
        self._like: Sequence[torch.Tensor] = ()
        self._seats: dict[tuple[int, Contribution], Seats] = {}

    def board(
        self, partials: Sequence[PartialSum], contribution: Contribution, like: Sequence[torch.Tensor]
    ) -> None:
        """Put this rank's partial sums into its room, if they fit.

        Args:
            partials: The sums.
            contribution: Describes them.
            like: Tensors of the shapes, dtypes and devices of the gradients.
        """
        if not self.table.room or contribution.sparse:
            return
        room = _present(self._seats_of(self._rank, contribution, like).partials)
        if room and partials:
            torch._foreach_copy_(room, _present(partials))

    def total(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
    ) -> Tensors | None:
        """Add up what has come, in the tree's order.

        Args:
            partials: This rank's own.
            contributions: What each rank has brought.
            like: Tensors of the shapes, dtypes and devices of the result.

        Returns:
            The sums; None where something did not fit, for which there may be room the next time.
        """
        seats = [self._seats_of(rank, each, like) for rank, each in enumerate(contributions)]
        needed = max(each.size for each in seats)
        if any(each.sparse for each in contributions) or not _fits(like):
            return None
        if needed > self.table.room:
            self._make_room(needed, len(seats))
            return None
        if is_pair(contributions, like):
            # The bits are the same the other way round, and what is added to is no room, which needs a copy.
            add_into(partials[0].tensors, seats[1 - self._rank].partials[0].tensors)
            return partials[0].tensors
        return self._in_order(partials, seats, len(like))

    def _in_order(self, partials: Sequence[PartialSum], seats: Sequence[Seats], count: int) -> Tensors:
        """Add up what all ranks brought."""
        sums: list[PartialSum] = []
        for rank, each in enumerate(seats):
            arrived = [PartialSum(here.shard, list(here.tensors)) for here in each.partials]
            sums += partials if rank == self._rank else arrived
        if not sums:
            return [None] * count
        own = {tensor.data_ptr() for tensor in _present(partials)}
        # What lies in a room will be written over.
        return [
            tensor if tensor is None or tensor.data_ptr() in own else tensor.clone() for tensor in total(sums)
        ]

    def _make_room(self, needed: int, size: int) -> None:
        if needed * (size - 1) <= SMALL:
            self.table = Table(size, needed)
            self._seats.clear()

    def _seats_of(self, rank: int, contribution: Contribution, like: Sequence[torch.Tensor]) -> Seats:
        """Say where a rank's partial sums are; much is the same at every update, and remembered."""
        if self._like is not like:
            self._like = like
            self._seats.clear()
        key = rank, contribution
        if key not in self._seats:
            if len(self._seats) >= MEMORY:
                self._seats.clear()
            self._seats[key] = _seats(self.table.body(rank), contribution, like)
        return self._seats[key]


def _seats(room: torch.Tensor, contribution: Contribution, like: Sequence[torch.Tensor]) -> Seats:
    """Lay partial sums end to end into a room."""
    masks = [[bool(mask >> index & 1) for index in range(len(like))] for mask in contribution.present]
    present = [tensor for mask in masks for there, tensor in zip(mask, like, strict=True) if there]
    size = sum(tensor.nbytes for tensor in present)
    if size > room.numel() or not _fits(like):
        return Seats(size, ())
    flats = iter(torch.split(room[:size].view(like[0].dtype), [tensor.numel() for tensor in present]))
    return Seats(
        size,
        [
            PartialSum(
                shard,
                [
                    next(flats).view(tensor.shape) if there else None
                    for there, tensor in zip(mask, like, strict=True)
                ],
            )
            for shard, mask in zip(contribution.shards, masks, strict=True)
        ],
    )


def _present(partials: Sequence[PartialSum]) -> list[torch.Tensor]:
    """List all tensors of partial sums."""
    return [tensor for each in partials for tensor in each.tensors if tensor is not None]


def _fits(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors can be laid end to end as bytes on the host."""
    first = tensors[0]
    return first.device.type == "cpu" and all(
        tensor.dtype == first.dtype and tensor.device == first.device and not tensor.is_sparse
        for tensor in tensors
    )
