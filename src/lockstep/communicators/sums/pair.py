"""The ordered sum where any order is the tree's: two ranks, each with one partial sum of the same tensors.

Addition of two numbers is commutative, so torch's own all_reduce, which adds each element once, has the bits
of the tree. Only of two NaNs it is open whose bits remain; formats of 16 bits are left out, because backends
round them in ways of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators.communicator import Contribution, PendingSum, check_brought, check_complete
from lockstep.communicators.transport import (
    LONG,
    PAIR,
    Channel,
    Works,
    all_reduce,
    begin_all_reduce,
    pack,
    plan_packets,
    unpack,
)
from lockstep.tree import PartialSum, Tensors, divide

EXACT: Final = (torch.float32, torch.float64)
"""Formats in which every backend adds two numbers with the one rounding that IEEE 754 asks for."""


def is_pair(contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> bool:
    """Tell whether two ranks bring one partial sum each, of the same tensors and in formats that add exactly.

    >>> one, two = Contribution((0,), (3,)), Contribution((4,), (3,))
    >>> is_pair([one, two], [torch.ones(1), torch.ones(1)]), is_pair([one], []), is_pair([one, two, two], [])
    (True, False, False)
    """
    return (
        len(contributions) == PAIR
        and all(len(each.shards) == 1 and not each.sparse for each in contributions)
        and contributions[0].present == contributions[1].present
        and all(tensor.dtype in EXACT for tensor in like)
    )


@torch.no_grad()
def sum_pair(channel: Channel, partial: PartialSum, divisor: float) -> Tensors:
    """Add up what each of two ranks has, in place, and divide it."""
    all_reduce(channel, [tensor for tensor in partial.tensors if tensor is not None])
    return divide(partial.tensors, divisor)


class PairSum(PendingSum):
    """A sum over two ranks of tensors that come one after the other; the transport's own threads add them up.

    Long tensors travel where they lie, short ones together. Packets go out in one order on both ranks, the
    last tensors first, as backward makes them; each as soon as it and all before it are there.

    Args:
        channel: Joins the two.
        contribution: What either brings.
        like: Tensors of the shapes, dtypes and devices of the result.
        divisor: The sum is divided by it, unless it is 1.
    """

    def __init__(
        self, channel: Channel, contribution: Contribution, like: Sequence[torch.Tensor], divisor: float
    ) -> None:
        self._channel = channel
        self._like = like
        self._divisor = divisor
        mask = contribution.present[0]
        self._missing = {index for index in range(len(like)) if mask >> index & 1}
        self._packets = plan_packets(like, sorted(self._missing, reverse=True), limit=LONG, alone=LONG)
        self._results: Tensors = [None] * len(like)
        self._flats: list[torch.Tensor] = []
        self._works: Works = []

    def bring(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Bring what this rank has of one tensor; see `PendingSum.bring`."""
        (tensor,) = tensors
        check_brought(index, tensor, awaited=index in self._missing)
        if tensor is None:
            return
        self._results[index] = tensor.detach()
        self._missing.remove(index)
        self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Send what is next, as far as it is there."""
        while len(self._works) < len(self._packets):
            packet = self._packets[len(self._works)]
            if not self._missing.isdisjoint(packet):
                return
            flat = pack(self._in_packet(packet))
            self._works += begin_all_reduce(self._channel, [flat])
            self._flats.append(flat)

    def _in_packet(self, packet: Sequence[int]) -> list[torch.Tensor]:
        return [tensor for index in packet if (tensor := self._results[index]) is not None]

    @torch.no_grad()
    def finish(self) -> Tensors:
        """Give the sums; see `PendingSum.finish`."""
        check_complete(self._missing)
        self._channel.wait(self._works)
        divide([*self._flats], self._divisor)
        for packet, flat in zip(self._packets, self._flats, strict=True):
            unpack(flat, self._in_packet(packet))
        return self._results

    def abandon(self) -> None:
        """Bring zeros for all that is missing; see `PendingSum.abandon`."""
        for index in sorted(self._missing, reverse=True):
            self.bring(index, [torch.zeros_like(self._like[index], memory_format=torch.contiguous_format)])
        self._channel.wait(self._works)
