"""Coordinate the ranks: they meet once in each attempt, to tell what each has, or that it cannot go on.

A rank whose own code raises still comes to the meeting of that attempt and says so. Then the others raise at
the same place, where nothing of the training state has changed, instead of waiting for it.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from lockstep.communicators import Communicator
from lockstep.errors import DisagreementError, PeerError, PeerInterrupt
from lockstep.updaters.attempt import UpdateSigint
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.rank_sum import RankSum

TRACEBACK_LIMIT: Final = 20_000
"""Characters of a traceback that travel: its end, which says most."""

Position = Mapping[str, Any]
"""What ranks must agree on when they meet, by the name that an error shall give it."""

NO_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()


class Coordinator(ABC):
    """What an updater does where ranks may have something to tell each other."""

    @abstractmethod
    def start_update(self) -> None:
        """Begin an update, or half of one."""

    @abstractmethod
    def state_loaded(self) -> None:
        """Take note that the state is another now, which ranks may have to compare."""

    @abstractmethod
    def reporting_errors(self) -> AbstractContextManager[None]:
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
    def hold_interrupts(self, interrupts: UpdateSigint) -> None:
        """Hold every interrupt from here to the end; what follows a meeting follows it on all ranks."""


class LocalCoordinator(Coordinator):
    """Of a process that is alone."""

    def start_update(self) -> None:
        """Do nothing."""

    def state_loaded(self) -> None:
        """Do nothing."""

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Tell nobody."""
        return NO_CONTEXT

    def agree(self, position: Position, interrupts: UpdateSigint) -> None:  # noqa: ARG002 - nobody to ask
        """Agree with oneself, once interrupts that came are delivered."""
        interrupts.check_and_hold()

    def hold_interrupts(self, interrupts: UpdateSigint) -> None:
        """Deliver what came, and hold what comes."""
        interrupts.check_and_hold()


class RankCoordinator(Coordinator):
    """Of several processes.

    Args:
        communicator: Joins them.
        consistency: Compares what must be alike.
        rank_sum: Brings their messages, and ends with each what else is on its way between them.
    """

    def __init__(self, communicator: Communicator, consistency: RankConsistency, rank_sum: RankSum) -> None:
        self._communicator = communicator
        self._consistency = consistency
        self._sum = rank_sum
        self._failed = False

    def start_update(self) -> None:
        """Forget how the last update ended; before the first one compare the ranks.

        Raises:
            DisagreementError: They are not alike.
        """
        self._failed = False
        self._consistency.check_start()

    def state_loaded(self) -> None:
        """Compare the ranks anew before the next update."""
        self._consistency.state_loaded()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the other ranks of an exception, unless they know: it was raised by the meeting itself."""
        try:
            yield
        except BaseException as error:
            if not self._failed:
                self._report_error(error)
            raise

    def exchange_reports(
        self, position: Position, report: Mapping[str, Any], *, repeat: bool = False
    ) -> list[Mapping[str, Any]] | None:
        """Bring a report to every rank.

        Args:
            position: What must be the same on all ranks.
            report: Anything that JSON knows.
            repeat: Whether this rank's share has to be computed again.

        What the ranks do together because of it is part of the meeting, until `end_exchange`.

        Returns:
            The reports of all ranks in order; None where one has to compute its share again, and so all do.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else, or its state is another.
            PeerInterrupt: A rank was interrupted.
        """
        own = {"position": position, "repeat": repeat, "report": report, "state": self._consistency.state_digest()}
        # What is raised from here on, the others raise as well, or cannot be messages.
        self._failed = True
        messages = self._sum.exchange(own)
        first, digests, reports = messages[0], [], []
        for rank, each in enumerate(messages):
            if "error" in each:
                _raise_error(rank, each)
        for rank, each in enumerate(messages):
            if each["position"] != first["position"]:
                _raise_differing_position(rank, each["position"], first["position"])
            repeat |= each["repeat"]
            digests.append(each["state"])
            reports.append(each["report"])
        self._consistency.check_digests(digests)
        return None if self._sum.must_repeat(messages) or repeat else reports

    def end_exchange(self) -> None:
        """End a meeting: what a rank raises from here on, it has to tell the others at the next."""
        self._failed = False

    def agree(self, position: Position, interrupts: UpdateSigint) -> None:
        """Meet without a report; see `Coordinator.agree`."""
        interrupts.check()
        self.exchange_reports(position, {})
        self._sum.reset_prediction()
        self.end_exchange()
        interrupts.hold()

    def hold_interrupts(self, interrupts: UpdateSigint) -> None:
        """Hold every interrupt: the other ranks will not hear of one that comes now."""
        interrupts.hold()

    def _report_error(self, error: BaseException) -> None:
        """Come to the meeting that the others are going to, and say what happened."""
        self._failed = True
        ended = isinstance(error, StopIteration)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        messages = self._sum.exchange(
            {
                "error": f"{type(error).__name__}: {error}",
                "traceback": text[-TRACEBACK_LIMIT:],
                "phase": self._communicator.watch.doing,
                "interrupt": isinstance(error, KeyboardInterrupt),
                "ended": ended,
            }
        )
        if ended and not all(each.get("ended") for each in messages):
            _raise_ended(self._communicator.rank)


def _raise_error(rank: int, message: Mapping[str, Any]) -> None:
    """Raise the error that a rank's message is about."""
    if message["ended"]:
        _raise_ended(rank)
    if message["interrupt"]:
        raise PeerInterrupt(f"Rank {rank} was interrupted.", rank=rank)
    raise PeerError(
        f"Rank {rank} raised {message['error']}\nIts own traceback:\n{message['traceback'].rstrip()}",
        rank=rank,
        phase=message["phase"],
        traceback=message["traceback"],
    )


def _raise_ended(rank: int) -> None:
    raise DisagreementError(
        f"The batches of rank {rank} must end with those of the others, but end before. Give every rank the "
        "same iterator.",
        rank=rank,
        subject="batches",
    )


def _raise_differing_position(rank: int, position: Position, first: Position) -> None:
    """Refuse to go on with a rank that is not where rank 0 is."""
    name = next(name for name in {**first, **position} if first.get(name) != position.get(name))
    raise DisagreementError(
        f"Rank {rank} must be where rank 0 is, but its {name} is {position.get(name)} and not "
        f"{first.get(name)}. Run the same code on every rank, and give it the same batches.",
        rank=rank,
        subject=name,
        update=first.get("update"),
    )
