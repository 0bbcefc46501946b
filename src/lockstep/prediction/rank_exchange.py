"""Exchange the results of an evaluation or a prediction between the ranks, and the error of a rank that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.communicators import Communicator
from lockstep.data import fingerprint
from lockstep.errors import DisagreementError
from lockstep.updaters import CURE, describe_error, raise_error


class RankExchange:
    """Exchanges messages of one evaluation, in which all ranks take the same steps.

    Args:
        communicator: The communicator of the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._checksums: list[int] = []
        self._failed = False

    def see(self, batch: Any) -> None:
        """Record a batch, so that ranks which are given different ones find out.

        Args:
            batch: The batch, before it is cut into shards.
        """
        if self._communicator.size > 1:
            self._checksums.append(fingerprint(batch, contents=False).checksum)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of ranks.

        Args:
            value: The value of this rank.

        Raises:
            PeerError: If a rank failed.
            PeerInterrupt: If a rank was interrupted.
            SignalExit: If a signal on a rank ends the run.
            DisagreementError: If the ranks were given different batches.
        """
        if self._communicator.size == 1:
            return [value]
        # An error from here on is raised on every rank, or cannot be sent.
        self._failed = True
        messages = self._communicator.gather_objects({"batches": self._checksums, "value": value})
        for rank, each in enumerate(messages):
            raise_error(rank, each)
        _check_same([each["batches"] for each in messages])
        self._checksums = []
        self._failed = False
        return [each["value"] for each in messages]

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Send an exception that is raised in the ``with`` block to the other ranks, which wait for a message."""
        try:
            yield
        except BaseException as error:
            if self._communicator.size > 1 and not self._failed:
                self._communicator.gather_objects(describe_error(error, phase="evaluation"))
            raise


def _check_same(by_rank: Sequence[Sequence[int]]) -> None:
    """Check that all ranks have seen the same batches.

    Args:
        by_rank: The checksums of the batches of each rank.

    Raises:
        DisagreementError: If a rank has seen others than rank 0.
    """
    for rank, seen in enumerate(by_rank):
        if list(seen) == list(by_rank[0]):
            continue
        pairs = zip(seen, by_rank[0], strict=False)
        position = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        what = f"there are {len(seen)} and not {len(by_rank[0])}" if position is None else f"batch {position} differs"
        raise DisagreementError(
            f"The evaluation batches of rank {rank} must be those of rank 0, but {what}. {CURE}",
            rank=rank,
            subject="evaluation batches",
        )
