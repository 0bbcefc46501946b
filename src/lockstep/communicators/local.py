"""The communicator of a process that runs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.communicators.communicator import Communicator, Contribution, PendingSum, SumAudit
from lockstep.communicators.transport.messages import MessageTable
from lockstep.errors import OrderError
from lockstep.tree import PartialSum, Tensors, total


class LocalCommunicator(Communicator):
    """The communicator of rank 0 of 1, which sends nothing and waits for nothing.

    Args:
        check_every: As for a `ProcessCommunicator`; without effect, because there is no other rank.
        differing_models: As for a `ProcessCommunicator`; without effect.

    >>> communicator = LocalCommunicator()
    >>> communicator.rank, communicator.size, communicator.exchange(b"alone")
    (0, 1, [b'alone'])
    """

    rank = 0
    size = 1

    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:  # noqa: ARG002 - already holds the only body
        """Return the message itself. A table already holds the only body."""
        return [payload]

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Leave the tensors unchanged: over one rank they are their own sum."""

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],  # noqa: ARG002 - those of one rank follow from `partials`
        like: Sequence[torch.Tensor],
        *,
        compress: bool = True,  # noqa: ARG002 - nothing is sent
        audit: SumAudit | None = None,  # noqa: ARG002 - as above
    ) -> Tensors:
        """Sum the partial sums of this process; see `Communicator.sum_partials`."""
        return total(partials) if partials else [None] * len(like)

    def begin_sum(self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> PendingSum:
        """Start to collect tensors until `finish` is called; see `Communicator.begin_sum`."""
        return LocalSum(contributions[0], len(like))

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Leave the tensors unchanged."""

    def gather_owned(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Leave the tensors unchanged: the only rank owns all of them."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the object itself."""
        return [value]

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Return at once, because there is no other rank to compare with."""

    def close(self) -> None:
        """Return at once, because nothing was opened."""


class LocalSum(PendingSum):
    """A sum over the only rank; see `LocalCommunicator.begin_sum`."""

    def __init__(self, announced: Contribution, num_tensors: int) -> None:
        self._announced, self._num_tensors = announced, num_tensors
        self._partials = [PartialSum(shard, [None] * num_tensors) for shard in announced.shards]

    def add(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Store the terms of one tensor; see `PendingSum.add`."""
        for partial, tensor in zip(self._partials, tensors, strict=True):
            partial.tensors[index] = tensor

    def finish(self) -> Tensors:
        """Return the sums of the stored terms; see `PendingSum.finish`."""
        # Nothing is summed before all terms are there: the order of the tree is not the order of their arrival.
        if Contribution.of(self._partials) != self._announced:
            raise OrderError("All announced terms must be added before `finish`, and no others.")
        return total(self._partials) if self._partials else [None] * self._num_tensors

    def abandon(self) -> None:
        """Return at once, because no other rank waits for the missing terms."""
