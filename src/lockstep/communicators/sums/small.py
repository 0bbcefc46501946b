"""Small sums by one collective: every rank sends all its terms to every other rank, and each adds all of them.

For two ranks this sends as many bytes as a ring does, and for more ranks it sends more; but it takes one step instead
of two, and the step may be that of a message that is sent anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.communicators.communicator import Contribution
from lockstep.communicators.transport.messages import ROW_ALIGNMENT, MessageTable
from lockstep.communicators.transport.packing import TensorSpec
from lockstep.tree import PartialSum, Tensors, total

CACHED_LAYOUTS: Final = 64
"""The number of layouts that are cached, enough for a few kinds of batches."""


@dataclass(frozen=True, slots=True)
class TermLayout:
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
    def of(cls, body: torch.Tensor, contribution: Contribution, like: Sequence[torch.Tensor]) -> TermLayout:
        """Lay out partial sums in a body, one tensor after another.

        Args:
            body: The bytes of the message's body.
            contribution: The description of the partial sums.
            like: Tensors with the shapes, dtypes and devices of the sums.
        """
        size = size_of_terms(contribution, like)
        if size > body.numel():
            return cls(size, (), [])
        partials = [PartialSum(shard, [None] * len(like)) for shard in contribution.shards]
        start = 0
        for partial, mask in zip(partials, contribution.present, strict=True):
            for index, tensor in enumerate(like):
                if mask >> index & 1:
                    part = body[start : start + tensor.nbytes]
                    partial.tensors[index] = part.view(tensor.dtype).view(tensor.shape)
                    start += _aligned(tensor)
        return cls(size, partials, [each for partial in partials for each in partial.tensors if each is not None])


def size_of_terms(contribution: Contribution, like: Sequence[torch.Tensor | TensorSpec]) -> int:
    """Return the number of bytes of the partial sums of a rank; a huge one if they cannot be sent in a message.

    Args:
        contribution: The description of the partial sums.
        like: Tensors with the shapes, dtypes and devices of the sums.
    """
    if contribution.sparse or any(tensor.device.type != "cpu" for tensor in like):
        return sys.maxsize
    return sum(
        _aligned(tensor) for mask in contribution.present for index, tensor in enumerate(like) if mask >> index & 1
    )


class SmallSum:
    """The memory for the terms in the messages of all ranks, which is kept from sum to sum.

    Args:
        rank: The index of this rank.
        size: The number of ranks.
        body_bytes: The number of bytes for the terms of a rank, the same on every rank.

    Attributes:
        table: The table of messages, to be exchanged between `pack` and `add_up`.
    """

    def __init__(self, rank: int, size: int, body_bytes: int = 0) -> None:
        self._rank, self._size = rank, size
        self._like: Sequence[torch.Tensor] = ()
        self._layouts: dict[tuple[int, Contribution], TermLayout] = {}
        self.table = MessageTable(size, body_bytes)

    def grow(self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor], *, limit: int) -> None:
        """Reserve memory for such terms in the messages to come, on all ranks alike.

        Args:
            contributions: The contributions of all ranks.
            like: Tensors with the shapes, dtypes and devices of the sums.
            limit: The number of bytes that a rank may send with a message, to all others together.
        """
        needed = max(size_of_terms(each, like) for each in contributions)
        if self.table.body_bytes < needed and needed * (self._size - 1) <= limit:
            self.table = MessageTable(self._size, needed)
            self._layouts.clear()

    def pack(self, partials: Sequence[PartialSum], contribution: Contribution, like: Sequence[torch.Tensor]) -> None:
        """Copy the partial sums of this rank into the body of its message, if they fit.

        Args:
            partials: The partial sums.
            contribution: The description of these sums.
            like: Tensors with the shapes, dtypes and devices of the sums.
        """
        if not self.table.body_bytes:
            return
        into = self._layout(self._rank, contribution, like).tensors
        if into and partials:
            torch._foreach_copy_(into, [each for part in partials for each in part.tensors if each is not None])

    def add_up(
        self, partials: Sequence[PartialSum], contributions: Sequence[Contribution], like: Sequence[torch.Tensor]
    ) -> Tensors | None:
        """Sum the terms of all ranks in the order of the tree, after the exchange of messages.

        Args:
            partials: The partial sums of this rank, which may be changed and hold the result.
            contributions: What each rank contributes.
            like: Tensors with the shapes, dtypes and devices of the sums.

        Returns:
            The sums; None if the terms of a rank did not fit, which all ranks find out alike.
        """
        layouts = [self._layout(rank, each, like) for rank, each in enumerate(contributions)]
        if max(layout.size for layout in layouts) > self.table.body_bytes:
            return None
        own: Tensors = partials[0].tensors[:] if partials else [None] * len(like)
        sums: list[PartialSum] = []
        for rank, layout in enumerate(layouts):
            copies = [PartialSum(each.shard, list(each.tensors)) for each in layout.partials]
            sums += partials if rank == self._rank else copies
        return list(map(_placed, total(sums), own)) if sums else own

    def _layout(self, rank: int, contribution: Contribution, like: Sequence[torch.Tensor]) -> TermLayout:
        """Return where the terms of a rank lie."""
        if self._like is not like or len(self._layouts) >= CACHED_LAYOUTS:
            self._like = like
            self._layouts.clear()
        if (rank, contribution) not in self._layouts:
            self._layouts[rank, contribution] = TermLayout.of(self.table.bodies[rank], contribution, like)
        return self._layouts[rank, contribution]


def _placed(result: torch.Tensor | None, own: torch.Tensor | None) -> torch.Tensor | None:
    """Return a sum in memory of this rank: it may lie in a message, and the next one overwrites that."""
    if result is None or result is own:
        return result
    return result.clone() if own is None else own.copy_(result)


def _aligned(tensor: torch.Tensor | TensorSpec) -> int:
    """Return the number of bytes of a tensor with what separates it from the next one."""
    return -(-tensor.nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
