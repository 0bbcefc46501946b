"""The ordered sum for two ranks that have one partial sum each of the same tensors.

There is only one addition per element, and addition is commutative, so torch's own all_reduce has the bits of the
tree. Two restrictions remain: which NaN results from two different NaNs is open, and 16-bit dtypes are excluded,
because backends round them in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators.communicator import Contribution, PendingSum, check_complete, check_term
from lockstep.communicators.transport import (
    LONG_TENSOR_BYTES,
    PAIR_SIZE,
    Channel,
    Works,
    all_reduce,
    begin_all_reduce,
    pack,
    plan_packets,
    unpack,
)
from lockstep.tree import PartialSum, Tensors, divide

EXACT_DTYPES: Final = (torch.float32, torch.float64)
"""The dtypes in which every backend adds two numbers with the single rounding of IEEE 754."""


def can_sum_as_pair(contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> bool:
    """Return whether two ranks have one partial sum each of the same tensors, in dtypes that are summed exactly.

    Args:
        contributions: The contributions of all ranks.
        like: Tensors that have the dtypes of those to sum.

    >>> one, two = Contribution((0,), (3,)), Contribution((4,), (3,))
    >>> can_sum_as_pair([one, two], [torch.ones(1), torch.ones(1)]), can_sum_as_pair([one, two, two], [])
    (True, False)
    """
    return (
        len(contributions) == PAIR_SIZE
        and all(len(each.shards) == 1 and not each.sparse for each in contributions)
        and contributions[0].present == contributions[1].present
        and all(tensor.dtype in EXACT_DTYPES for tensor in like)
    )


@torch.no_grad()
def sum_pair(channel: Channel, partial: PartialSum, divisor: float) -> Tensors:
    """Sum the partial sums of two ranks in place, and divide the sums.

    Args:
        channel: The connection between the two ranks.
        partial: The partial sum of this rank.
        divisor: The number by which the sums are divided, unless it is 1.
    """
    all_reduce(channel, [tensor for tensor in partial.tensors if tensor is not None])
    return divide(partial.tensors, divisor)


class PairSum(PendingSum):
    """A sum over two ranks of tensors that become available one after the other.

    The transport's own threads compute it. Long tensors are sent in place, short ones are copied together. A packet
    is sent as soon as it and all packets before it are complete.

    Args:
        channel: The connection between the two ranks.
        contribution: The contribution of either rank.
        like: Tensors that have the shapes, dtypes and devices of the result.
        divisor: The number by which the sums are divided, unless it is 1.
    """

    def __init__(
        self, channel: Channel, contribution: Contribution, like: Sequence[torch.Tensor], divisor: float
    ) -> None:
        self._channel = channel
        self._like = like
        self._divisor = divisor
        mask = contribution.present[0]
        self._missing = {index for index in range(len(like)) if mask >> index & 1}
        # The last tensors come first, as backward computes them. The order is fixed and does not depend on when they
        # arrive, because a collective must be the same one on both ranks.
        self._packets = plan_packets(
            like, sorted(self._missing, reverse=True), limit=LONG_TENSOR_BYTES, alone=LONG_TENSOR_BYTES
        )
        self._results: Tensors = [None] * len(like)
        self._flats: list[torch.Tensor] = []
        self._works: Works = []

    def add(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Add this rank's term of one tensor; see `PendingSum.add`."""
        (tensor,) = tensors
        check_term(index, tensor, awaited=index in self._missing)
        if tensor is None:
            return
        self._results[index] = tensor.detach()
        self._missing.remove(index)
        self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Send the next packets, up to the first incomplete one."""
        while len(self._works) < len(self._packets):
            packet = self._packets[len(self._works)]
            if not self._missing.isdisjoint(packet):
                return
            flat = self._channel.reachable(pack(self._tensors_of(packet)))
            self._works += begin_all_reduce(self._channel, [flat])
            self._flats.append(flat)

    def _tensors_of(self, packet: Sequence[int]) -> list[torch.Tensor]:
        return [tensor for index in packet if (tensor := self._results[index]) is not None]

    @torch.no_grad()
    def finish(self) -> Tensors:
        """Return the sums; see `PendingSum.finish`."""
        check_complete(self._missing)
        self._channel.wait(self._works)
        divide([*self._flats], self._divisor)
        for packet, flat in zip(self._packets, self._flats, strict=True):
            unpack(flat, self._tensors_of(packet))
        return self._results

    def abandon(self) -> None:
        """Add zeros for all missing tensors; see `PendingSum.abandon`."""
        for index in sorted(self._missing, reverse=True):
            # A contiguous tensor need not be copied by `pack`.
            self.add(index, [torch.zeros_like(self._like[index], memory_format=torch.contiguous_format)])
        self._channel.wait(self._works)
