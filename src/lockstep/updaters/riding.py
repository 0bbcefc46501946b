"""Let small gradients ride in the message by which ranks meet, which saves them a journey.

For two ranks that is as many bytes as a ring would send, for more it is more; so only small ones ride.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators import Contribution, Table
from lockstep.tree import PartialSum, Tensors, total

SMALL: Final = 2**20
"""Bytes that a rank may send with its message, to all others together."""


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

    def board(self, partials: Sequence[PartialSum]) -> None:
        """Put this rank's partial sums into its room, if they fit."""
        present = [tensor for each in partials for tensor in each.tensors if tensor is not None]
        room = self.table.body(self._rank)
        if present and _fits(present) and sum(tensor.nbytes for tensor in present) <= room.numel():
            flats = [tensor.reshape(-1) for tensor in present]
            torch.cat(flats, out=room.view(present[0].dtype)[: sum(flat.numel() for flat in flats)])

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
        needed = [_bytes_of(each, like) for each in contributions]
        if not _fits(like) or max(needed) > self.table.room:
            self._make_room(max(needed), len(needed), like)
            return None
        sums: list[PartialSum] = []
        for rank, contribution in enumerate(contributions):
            sums += partials if rank == self._rank else _unpacked(self.table.body(rank), contribution, like)
        if not sums:
            return [None] * len(like)
        own = {tensor.data_ptr() for each in partials for tensor in each.tensors if tensor is not None}
        # What lies in a room will be written over.
        return [
            tensor if tensor is None or tensor.data_ptr() in own else tensor.clone() for tensor in total(sums)
        ]

    def _make_room(self, needed: int, size: int, like: Sequence[torch.Tensor]) -> None:
        if _fits(like) and needed * (size - 1) <= SMALL:
            self.table = Table(size, needed)


def _fits(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors can be laid end to end as bytes on the host."""
    first = tensors[0]
    return first.device.type == "cpu" and all(
        tensor.dtype == first.dtype and tensor.device == first.device and not tensor.is_sparse
        for tensor in tensors
    )


def _bytes_of(contribution: Contribution, like: Sequence[torch.Tensor]) -> int:
    return sum(
        tensor.nbytes
        for mask in contribution.present
        for index, tensor in enumerate(like)
        if mask >> index & 1
    )


def _unpacked(
    room: torch.Tensor, contribution: Contribution, like: Sequence[torch.Tensor]
) -> list[PartialSum]:
    """Find the partial sums in a room."""
    masks = [[bool(mask >> index & 1) for index in range(len(like))] for mask in contribution.present]
    sizes = [tensor.numel() for mask in masks for there, tensor in zip(mask, like, strict=True) if there]
    flats = iter(torch.split(room.view(like[0].dtype)[: sum(sizes)], sizes))
    return [
        PartialSum(
            shard,
            [
                next(flats).view(tensor.shape) if there else None
                for there, tensor in zip(mask, like, strict=True)
            ],
        )
        for shard, mask in zip(contribution.shards, masks, strict=True)
    ]
