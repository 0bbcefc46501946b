"""The interface between the processes of one run.

A rank is a process's index in 0..`size`-1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.communicators.failures import Watch
from lockstep.communicators.transport import Table
from lockstep.errors import OrderError
from lockstep.tree import PartialSum, Tensors


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brings to a sum over all shards; every rank knows all ranks' contributions.

    Attributes:
        shards: The first shard of each of its partial sums, ascending, as `PartialSum.shard`.
        present: For each of them, which of the P tensors it has: bit p stands for tensor p.
        sparse: Which of the tensors this rank has as sparse ones.

    >>> partial = PartialSum(4, [torch.ones(2), None, torch.ones(3)])
    >>> Contribution.of([partial])
    Contribution(shards=(4,), present=(5,), sparse=0)
    """

    shards: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    sparse: int = 0

    @classmethod
    def of(cls, partials: Sequence[PartialSum]) -> Contribution:
        """Describe the partial sums of a rank."""
        shards: list[int] = []
        present: list[int] = []
        sparse = 0
        for partial in partials:
            mask, bit = 0, 1
            for tensor in partial.tensors:
                if tensor is not None:
                    mask |= bit
                    sparse |= bit if tensor.is_sparse else 0
                bit <<= 1
            shards.append(partial.shard)
            present.append(mask)
        return cls(tuple(shards), tuple(present), sparse)


class PendingSum(ABC):
    """A sum over all ranks, of tensors that each rank brings one after the other.

    Every rank brings what its `Contribution` has announced, in any order, and ends with `finish` or
    `abandon`. The last tensors are best brought first, as backward makes them: they travel first.
    """

    @abstractmethod
    def bring(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Bring what this rank has of one tensor.

        Args:
            index: Which tensor.
            tensors: One for each partial sum of this rank; None where it has none. They may be changed, and
                the first of them may hold the result.

        Raises:
            OrderError: It differs from what was announced, or has been brought already.
        """

    @abstractmethod
    def finish(self) -> Tensors:
        """Give the sums, one entry a tensor, once everything has been brought; None where no rank has any.

        Raises:
            OrderError: Something announced has not been brought.
            PeerError: Another rank is gone.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Bring zeros for all that is missing, so that no other rank waits for it, and drop the sums.

        For a rank that cannot bring what it announced. The others finish, with sums that are worth nothing:
        it has to tell them.
        """


def check_brought(index: int, tensor: torch.Tensor | None, *, awaited: bool) -> None:
    """Raise `OrderError` unless a part of a tensor is there just where it was announced, and dense."""
    if (tensor is not None) != awaited:
        what = "missing" if tensor is None else "not awaited"
        raise OrderError(f"`bring` must get what was announced, once, but a part of tensor {index} is {what}.")
    if tensor is not None and tensor.is_sparse:
        raise OrderError(f"`bring` must get dense tensors, but a part of tensor {index} is sparse.")


def check_complete(missing: Collection[int]) -> None:
    """Raise `OrderError` where tensors that were announced are missing at the end of a sum."""
    if missing:
        rule = "Everything announced must be brought before `finish`"
        raise OrderError(f"{rule}, but tensor {min(missing)} was not.")


class Communicator(ABC):
    """Joins the processes of one run.

    Every method but the properties is collective: all ranks call it, in the same order.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's index in 0..`size`-1."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many processes there are."""

    @property
    @abstractmethod
    def watch(self) -> Watch:
        """Tells what the other ranks are doing, and whether one has failed."""

    @property
    def exact(self) -> bool:
        """Whether sums over shards have the tree's bits, wherever shards are cut over ranks."""
        return True

    @abstractmethod
    def exchange(self, payload: bytes) -> list[bytes]:
        """Send one small message to every rank, and give those of all ranks in order of ranks.

        Args:
            payload: Of any length; ranks need not send equally much. Up to 4 KiB it is one message.
        """

    @abstractmethod
    def exchange_with(self, payload: bytes, table: Table) -> list[bytes]:
        """Exchange messages, as `exchange`, and with each of them numbers, in one journey.

        Args:
            payload: The message.
            table: Of the same size on every rank. The body of this rank is sent, the others' are written to.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Add up tensors over ranks, on every rank and in place.

        Args:
            tensors: Of the same shapes and dtypes on every rank; changed in place.
            ordered: Add in the order of the tree whose leaf r is rank r. Otherwise in whatever order is
                fastest.

        Determinism: in order, the bits depend on the ranks' tensors and nothing else. Otherwise they may
        depend on how many tensors are given at once, and on the transport.
        """

    @abstractmethod
    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
        compress: bool = True,
    ) -> Tensors:
        """Add up the partial sums of all ranks in the tree's order, and divide once.

        Args:
            partials: This rank's, in ascending order of shards, all on one device. What they hold may be
                changed, and may lie in the result.
            contributions: What every rank brings, in order of ranks; shards ascend over all of them. The one
                of this rank describes `partials`.
            like: P tensors that have the shapes, dtypes and devices of the result.
            divisor: The sum is divided by it, unless it is 1.
            compress: Whether numbers may be rounded on their way, if the communicator was made to.

        Returns:
            P tensors; None where no rank has one.

        Determinism: the bits are those of `tree.total` over all partial sums followed by one division. They
        depend on which shards were present, and not on how they are spread over ranks.
        """

    @abstractmethod
    def begin_sum(
        self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor], *, divisor: float = 1.0
    ) -> PendingSum:
        """Begin what `sum_partials` does, for tensors that come one after the other.

        On CPUs a thread sends what has been brought while the caller goes on computing, with the same bits.
        Until its end no other sum may be begun; messages may be exchanged. Sparse tensors are not for it.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy tensors from one rank to all others.

        Args:
            tensors: Of the same shapes and dtypes on every rank; changed in place, but on the source.
            source: The rank they come from, in 0..`size`-1.
        """

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank the objects of all, in order of ranks.

        Objects travel as torch.distributed sends them, pickled: only between the processes of one run.
        """

    @abstractmethod
    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Refuse to go on unless all ranks hold the same bits.

        Args:
            subject: A module (its parameters and buffers), or tensors with or without names.

        Raises:
            DisagreementError: On every rank; it names the first rank that differs from rank 0, and the first
                tensor in which it does.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has come this far."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the communicator itself has opened. Calls after the first do nothing."""
