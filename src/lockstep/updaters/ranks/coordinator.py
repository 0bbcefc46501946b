"""Coordinate the ranks: they meet once in each attempt, to tell what each has, or that it cannot go on.

A rank whose own code raises still comes to the meeting of that attempt and says so. Then the others raise at
the same place, where nothing of the training state has changed, instead of waiting for it.
"""

from __future__ import annotations

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from lockstep.communicators import Communicator
from lockstep.errors import DisagreementError, PeerError, PeerInterrupt
from lockstep.replicas import forked
from lockstep.updaters.attempt import UpdateSigint
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.rank_sum import RankSum
from lockstep.updaters.ranks.same_batches import BATCHES, CURE, find_other_batches

LONGEST_TRACEBACK: Final = 20_000
"""Characters of a traceback that travel: its end, which says most."""

Position = Mapping[str, Any]
"""What ranks must agree on when they meet, by the name that an error shall give it."""

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class Coordinator(ABC):
    """What an updater does where ranks may have something to tell each other."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """Check that this is the process that built the updater, and not one forked from it.

        Raises:
            OrderError: It is another process.
        """
        if self._process != os.getpid():
            raise forked("ParallelUpdater")

    @abstractmethod
    def begin(self) -> None:
        """Begin an update, or half of one.

        Raises:
            OrderError: The updater was built in the process that this one was forked from.
        """

    @abstractmethod
    def state_loaded(self) -> None:
        """Take note that the state is another now, which ranks may have to compare."""

    @abstractmethod
    def telling(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an exception that is raised inside of the ``with``."""

    @abstractmethod
    def agree(self, position: Position, interrupts: UpdateSigint) -> None:
        """Go on only if no rank failed or was interrupted until here; from here on none delivers interrupts.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else.
            PeerInterrupt: A rank was interrupted.
        """

    @abstractmethod
    def commit(self, interrupts: UpdateSigint) -> None:
        """Hold every interrupt from here to the end; what follows a meeting follows it on all ranks."""


class LocalCoordinator(Coordinator):
    """Of a process that is alone."""

    def begin(self) -> None:
        """Check that this is the process that built the updater."""
        self.check_process()

    def state_loaded(self) -> None:
        """Do nothing."""

    def telling(self) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING

    def agree(self, position: Position, interrupts: UpdateSigint) -> None:  # noqa: ARG002 - nobody to ask
        """Agree with oneself, once interrupts that came are delivered."""
        interrupts.commit()

    def commit(self, interrupts: UpdateSigint) -> None:
        """Deliver what came, and hold what comes."""
        interrupts.commit()


class RankCoordinator(Coordinator):
    """Of several processes.

    Args:
        communicator: Joins them.
        alike: Compares what must be alike.
        rank_sum: Brings their messages, and ends with each what else is on its way between them.
    """

    def __init__(self, communicator: Communicator, alike: RankConsistency, rank_sum: RankSum) -> None:
        super().__init__()
        self._communicator = communicator
        self._alike = alike
        self._sum = rank_sum
        self._failed = False

    def begin(self) -> None:
        """Forget how the last update ended; before the first one compare the ranks.

        Raises:
            DisagreementError: They are not alike.
            OrderError: The updater was built in the process that this one was forked from.
        """
        # Before any message, because a forked process would write into the connections of the other one.
        self.check_process()
        self._failed = False
        self._alike.begin()

    def state_loaded(self) -> None:
        """Compare the ranks anew before the next update."""
        self._alike.state_loaded()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an exception, unless they know: it was raised by the meeting itself."""
        try:
            yield
        except BaseException as error:
            if not self._failed:
                self._tell(error)
            raise

    def meet(
        self, position: Position, report: Mapping[str, Any], *, again: bool = False
    ) -> list[Mapping[str, Any]] | None:
        """Bring a report to every rank.

        Args:
            position: What must be the same on all ranks.
            report: Anything that JSON knows.
            again: Whether this rank's share has to be computed again.

        What the ranks do together because of it is part of the meeting, until `part`.

        Returns:
            The reports of all ranks in order; None where one has to compute its share again, and so all do.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else, or its state is another.
            PeerInterrupt: A rank was interrupted.
        """
        message = {"position": position, "again": again, "report": report, "state": self._alike.digest()}
        # What is raised from here on, the others raise as well, or cannot be told.
        self._failed = True
        told = self._sum.exchange(message)
        first, digests, reports = told[0], [], []
        for rank, each in enumerate(told):
            if "error" in each:
                _raise_error(rank, each)
        for rank, each in enumerate(told):
            if each["position"] != first["position"]:
                _raise_elsewhere(rank, [other["position"] for other in told])
            again |= each["again"]
            digests.append(each["state"])
            reports.append(each["report"])
        self._alike.check(digests)
        return None if self._sum.must_repeat(told) or again else reports

    def part(self) -> None:
        """End a meeting: what a rank raises from here on, it has to tell the others at the next."""
        self._failed = False

    def agree(self, position: Position, interrupts: UpdateSigint) -> None:
        """Meet without a report; see `Coordinator.agree`."""
        interrupts.check()
        self.meet(position, {})
        self._sum.reset_prediction()
        self.part()
        interrupts.hold()

    def commit(self, interrupts: UpdateSigint) -> None:
        """Hold every interrupt: the other ranks will not hear of one that comes now."""
        interrupts.hold()

    def _tell(self, error: BaseException) -> None:
        """Come to the meeting that the others are going to, and say what happened."""
        self._failed = True
        ended = isinstance(error, StopIteration)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        told = self._sum.exchange(
            {
                "error": f"{type(error).__name__}: {error}",
                "traceback": text[-LONGEST_TRACEBACK:],
                "phase": self._communicator.watch.doing,
                "interrupt": isinstance(error, KeyboardInterrupt),
                "ended": ended,
            }
        )
        if ended and not all(each.get("ended") for each in told):
            _raise_ended(self._communicator.rank)


def _raise_error(rank: int, told: Mapping[str, Any]) -> None:
    """Raise the error that a rank's message is about."""
    if told["ended"]:
        _raise_ended(rank)
    if told["interrupt"]:
        raise PeerInterrupt(f"Rank {rank} was interrupted.", rank=rank)
    raise PeerError(
        f"Rank {rank} raised {told['error']}\nIts own traceback:\n{told['traceback'].rstrip()}",
        rank=rank,
        phase=told["phase"],
        traceback=told["traceback"],
    )


def _raise_ended(rank: int) -> None:
    raise DisagreementError(
        f"The batches of rank {rank} must end with those of the others, but end before. {CURE}",
        rank=rank,
        subject="batches",
    )


def _raise_elsewhere(rank: int, positions: Sequence[Position]) -> None:
    """Refuse to go on with a rank that is not where rank 0 is.

    Args:
        rank: The first rank that is not.
        positions: Those of all ranks.
    """
    position, first = positions[rank], positions[0]
    name = next(name for name in {**first, **position} if first.get(name) != position.get(name))
    if name in {"batch sizes", BATCHES}:
        raise find_other_batches(positions, name)
    raise DisagreementError(
        f"Rank {rank} must be where rank 0 is, but its {name} is {position.get(name)} and not "
        f"{first.get(name)}. Run the same code on every rank, and give it the same batches.",
        rank=rank,
        subject=name,
        update=first.get("update"),
    )
