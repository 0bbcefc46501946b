"""The interface by which the processes of a run communicate.

A rank is the index of a process, from 0 to `size` - 1.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import nn

from lockstep.arguments import check_choice, check_integer
from lockstep.communicators.failures.failure import IN_EVERY_PROCESS
from lockstep.communicators.failures.watch import Watch
from lockstep.communicators.transport.messages import MessageTable
from lockstep.digest import seal
from lockstep.errors import DisagreementError
from lockstep.tree import PartialSum, Tensors

OnMismatch = Literal["broadcast", "refuse"]
"""What happens where models differ between ranks when a run begins: they take the values of rank 0, or the run ends."""

OF_UPDATES: Final = b"u"
"""The start of messages of updates, with which no other message begins."""
PICKLED: Final = b"\x80"
"""The start of every pickled object."""

_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))
_DECODER: Final = json.JSONDecoder()  # `json.loads` finds out the encoding first


@dataclass(frozen=True, slots=True)
class Contribution:
    """A description of what one rank contributes to a sum over all shards. Every rank knows that of every other.

    Attributes:
        shards: The first shard of each partial sum of the rank, ascending, as in `PartialSum.shard`.
        present: For each partial sum a mask of the P tensors that it has: bit p stands for tensor p.
        sparse: A mask of the tensors that are sparse on this rank.

    >>> partial = PartialSum(4, [torch.ones(2), None, torch.ones(3)])
    >>> Contribution.of([partial])
    Contribution(shards=(4,), present=(5,), sparse=0)
    """

    shards: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    sparse: int = 0

    @classmethod
    def of(cls, partials: Sequence[PartialSum]) -> Contribution:
        """Return the description of the partial sums of a rank."""
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


SumFault: TypeAlias = "tuple[int | None, str]"
"""What is wrong in a sum over ranks: the rank that sent a damaged term, added wrongly, or holds a damaged sum, None if
ranks differ without a majority; and a clause that says so."""


class SumAudit:
    """What sums that are computed twice are compared with. Create it as soon as the partial sums are computed.

    Args:
        partials: The partial sums of this rank, of all of these sums.
        turn: The number of audits before this one, by which it is chosen which part is added by all ranks.

    Attributes:
        turn: As passed.
        fault: What was wrong, the same on every rank; None if nothing was.
    """

    def __init__(self, partials: Sequence[PartialSum], turn: int) -> None:
        self.turn = turn
        self._before = {id(each): seal(each) for part in partials for each in part.tensors if each is not None}
        self.fault: SumFault | None = None

    def has_changed(self, partials: Sequence[PartialSum]) -> bool:
        """Return whether bits have changed since then.

        Args:
            partials: Some of the partial sums.
        """
        present = (each for part in partials for each in part.tensors if each is not None)
        return any(seal(each) != self._before[id(each)] for each in present)


class PendingSum(ABC):
    """A sum over all ranks of tensors that become available one after the other.

    Every rank calls `add` for what its `Contribution` has announced, in any order, and ends with `finish` or
    `abandon`. Add the last tensors first, in the order in which backward computes gradients: they are sent first.
    """

    @abstractmethod
    def add(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Add this rank's terms of one tensor to the sum; on an accelerator, those of the current stream.

        Args:
            index: The index of the tensor.
            tensors: One term per partial sum of this rank, or None for a partial sum without this tensor. The
                terms may be changed in place, and the first one may hold the result.

        Raises:
            OrderError: If the terms are not those that were announced, or were added before.
        """

    @abstractmethod
    def finish(self) -> Tensors:
        """Wait for the sums, once all terms have been added.

        Returns:
            One sum per tensor; None for a tensor that no rank has.

        Raises:
            OrderError: If a term that was announced is missing.
            PeerError: If another rank has failed.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Add zeros for all missing terms, so that no other rank waits for them, and discard the sums.

        Call this on a rank that cannot add what it announced. The other ranks finish with meaningless sums, so
        you must tell them.
        """


class Communicator(ABC):
    """The connection between the processes of a run.

    Every method is collective: all ranks must call it, in the same order.

    Args:
        check_every: The number of updates, at least 1, within which an updater compares all bits of its state between
            the ranks.
        differing_models: Whether models that differ when a run begins are those of rank 0 (``"broadcast"``) or an error
            (``"refuse"``).

    Raises:
        TypeError: If `check_every` is no integer.
        ValueError: If an argument is out of range.
    """

    rank: int
    """The index of this process, from 0 to `size` - 1."""
    size: int
    """The number of processes."""
    watch: Watch
    """The watch that knows what the other ranks are doing, and whether one has failed."""
    exact: bool = True
    """Whether sums over shards have the bits of the tree, no matter how shards are distributed over ranks."""
    sends_early: bool = True
    """Whether `begin_sum` can send tensors while the caller continues."""

    def __init__(self, *, check_every: int = 100, differing_models: OnMismatch = "broadcast") -> None:
        check_integer("check_every", check_every, minimum=1)
        check_choice("differing_models", differing_models, get_args(OnMismatch))
        self.check_every = check_every
        self.differing_models: OnMismatch = differing_models
        self.watch = Watch()

    @abstractmethod
    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:
        """Send a short message to every rank, and return the messages of all ranks in order of ranks.

        Args:
            payload: The message of this rank, of any length; lengths may differ between ranks. Up to 4 KiB it is
                sent at once.
            table: A table of the same size on every rank, to send tensors with the messages: the body of this rank is
                sent, and the bodies of the other ranks are overwritten with theirs. None to send no body.
        """

    def exchange_json(self, value: Any, table: MessageTable | None = None) -> list[Any]:
        """Send a value that JSON can hold to every rank, and return the values of all ranks in order of ranks.

        Args:
            value: The value of this rank, such as numbers, text and lists of them.
            table: As for `exchange`. Messages with a table, which are those of updates, are told from others.

        Raises:
            DisagreementError: If another rank has sent something else, because it has made another call.

        >>> from lockstep.communicators import LocalCommunicator
        >>> LocalCommunicator().exchange_json([1, "two"])
        [[1, 'two']]
        """
        start = b"" if table is None else OF_UPDATES
        messages = self.exchange(start + _COMPACT.encode(value).encode(), table)
        _check_calls(messages, start)
        found = []
        for rank, each in enumerate(messages):
            try:
                found.append(_DECODER.decode(each[len(start) :].decode()))
            except ValueError as error:
                raise _other_call(rank) from error
        return found

    @abstractmethod
    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Sum tensors over ranks, on every rank and in place.

        Args:
            tensors: The tensors, of the same shapes and dtypes on every rank. Changed in place.
            ordered: Whether to add in the order of the tree whose leaf r is rank r. If not, the order is the
                fastest one.

        Determinism: in order, the bits depend on the tensors of the ranks and nothing else. Otherwise they may
        depend on how many tensors you pass at once, and on the transport.
        """

    @abstractmethod
    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        compress: bool = True,
        audit: SumAudit | None = None,
    ) -> Tensors:
        """Sum the partial sums of all ranks in the order of the tree.

        Args:
            partials: The partial sums of this rank, in ascending order of shards and all on one device. Their
                tensors may be changed in place, and may be part of the result.
            contributions: The contributions of all ranks, in order of ranks. Shards must ascend over all of them,
                and the contribution of this rank must describe `partials`.
            like: P tensors that have the shapes, dtypes and devices of the result.
            compress: Whether numbers may be rounded when they are sent, if the communicator was created with
                compression.
            audit: Computes the sum a second time and finds what is wrong where both differ, unless numbers are rounded
                or sparse; None to sum once.

        Returns:
            P sums; None for a tensor that no rank has.

        Determinism: the bits are those of `tree.total` over all partial sums. They depend on which shards are
        present, and not on how the shards are distributed over ranks.
        """

    @abstractmethod
    def begin_sum(self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> PendingSum:
        """Start a sum as by `sum_partials` over tensors that become available one after the other.

        A thread sends tensors while the caller continues, on accelerators on a stream of its own and only if all are on
        one device; the bits are the same. Start no other sum before this one has ended; exchanging messages is allowed.
        Sparse tensors are not supported.

        Args:
            contributions: The contributions of all ranks, as for `sum_partials`.
            like: P tensors that have the shapes, dtypes and devices of the result.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy tensors from one rank to all others.

        Args:
            tensors: The tensors, of the same shapes and dtypes on every rank. Changed in place except on `source`.
            source: The rank that the tensors are copied from, from 0 to `size` - 1.
        """

    @abstractmethod
    def gather_owned(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy to every rank the tensors that each rank owns.

        Args:
            parts: For each rank the tensors that it owns, contiguous and of the same sizes and dtypes on every rank.
                Those of the other ranks are overwritten in place.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in order of ranks, on every rank.

        Args:
            value: The object of this rank. It is pickled, so use this only between the processes of one run.

        Raises:
            DisagreementError: If another rank has sent something else, because it has made another call.
        """
        messages = self.exchange(pickle.dumps(value))
        _check_calls(messages, PICKLED)
        return [pickle.loads(each) for each in messages]  # noqa: S301 - of the same run

    @abstractmethod
    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Check that all ranks hold the same bits.

        Args:
            subject: A module, of which the parameters and buffers are compared, or tensors with or without names.

        Raises:
            DisagreementError: On every rank, if the bits differ. It names the first rank that differs from rank 0,
                and the first tensor in which it does.
        """

    def barrier(self) -> None:
        """Wait until every rank has made this call."""
        self.exchange(b"")

    @abstractmethod
    def close(self) -> None:
        """Release what the communicator itself has opened. Calls after the first do nothing."""


def _check_calls(messages: Sequence[bytes], start: bytes) -> None:
    """Check that the messages of all ranks begin as those of one kind of call do."""
    for rank, each in enumerate(messages):
        if not each.startswith(start):
            raise _other_call(rank)


def _other_call(rank: int) -> DisagreementError:
    return DisagreementError(
        f"All processes must make the same calls in the same order, got another one on rank {rank}. {IN_EVERY_PROCESS}",
        rank=rank,
        subject="the order of calls",
    )
