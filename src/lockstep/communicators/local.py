"""The communicator of a process that is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.communicators.communicator import Communicator, Contribution, PendingSum
from lockstep.communicators.failures import Watch
from lockstep.communicators.transport import Table
from lockstep.errors import OrderError
from lockstep.tree import PartialSum, Tensors, divide, total


class LocalCommunicator(Communicator):
    """Rank 0 of 1: nothing is sent, nothing is waited for.

    >>> communicator = LocalCommunicator()
    >>> communicator.rank, communicator.size, communicator.exchange(b"alone")
    (0, 1, [b'alone'])
    """

    def __init__(self) -> None:
        self._watch = Watch()

    @property
    def watch(self) -> Watch:
        """Of nobody."""
        return self._watch

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give back the message."""
        return [payload]

    def exchange_with(self, payload: bytes, table: Table) -> list[bytes]:  # noqa: ARG002 - holds its own body
        """Give back the message; the body is there already."""
        return [payload]

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Leave the tensors as they are: they are their own sum."""

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],  # noqa: ARG002 - `partials` say it all here
        like: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
        compress: bool = True,  # noqa: ARG002 - nothing travels
    ) -> Tensors:
        """Add up the partial sums of this process; see `Communicator.sum_partials`."""
        summed: Tensors = total(partials) if partials else [None] * len(like)
        return divide(summed, divisor)

    def begin_sum(
        self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor], *, divisor: float = 1.0
    ) -> PendingSum:
        """Collect tensors until `finish`; see `Communicator.begin_sum`."""
        return LocalSum(self, contributions, like, divisor)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Leave the tensors as they are."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Give back the object itself."""
        return [value]

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Agree with oneself."""

    def barrier(self) -> None:
        """Go on."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""


class LocalSum(PendingSum):
    """A sum over the one rank there is; see `LocalCommunicator.begin_sum`."""

    def __init__(
        self,
        communicator: LocalCommunicator,
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        divisor: float,
    ) -> None:
        self._communicator = communicator
        self._contributions = contributions
        self._like = like
        self._divisor = divisor
        shards = contributions[0].shards
        self._partials = [PartialSum(shard, [None] * len(like)) for shard in shards]

    def bring(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Take what there is of one tensor; see `PendingSum.bring`."""
        for partial, tensor in zip(self._partials, tensors, strict=True):
            partial.tensors[index] = tensor

    def finish(self) -> Tensors:
        """Add up what has been brought; see `PendingSum.finish`."""
        if Contribution.of(self._partials) != self._contributions[0]:
            raise OrderError("Everything announced must be brought before `finish`, and nothing else.")
        return self._communicator.sum_partials(self._partials, self._contributions, self._like, divisor=self._divisor)

    def abandon(self) -> None:
        """Drop what has been brought: nobody waits for it."""
