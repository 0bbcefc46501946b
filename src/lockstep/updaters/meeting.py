"""Where the ranks meet: once in each try, to say what each has, or that it cannot go on.

A rank whose own code raises still comes to the meeting of that try and says so. Then the others raise at
the same place, where nothing of the training state has changed, instead of waiting for it.
"""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from lockstep.communicators import Communicator
from lockstep.errors import DisagreementError, PeerError, PeerInterrupt
from lockstep.updaters.alike import Alikeness
from lockstep.updaters.context import HeldInterrupts
from lockstep.updaters.overlap import Overlap
from lockstep.updaters.riding import Riders

LONGEST_TRACEBACK: Final = 20_000
"""Characters of a traceback that travel: its end, which says most."""

Position = Mapping[str, Any]
"""What ranks must agree on when they meet, by the name that an error shall give it."""

_BRIEF: Final = json.JSONEncoder(separators=(",", ":"))

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class Meeting(ABC):
    """What an updater does where ranks may have something to say to each other."""

    @abstractmethod
    def begin(self) -> None:
        """Begin an update, or half of one."""

    @abstractmethod
    def state_loaded(self) -> None:
        """Take note that the state is another now, which ranks may have to compare."""

    @abstractmethod
    def telling(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an exception that is raised inside of the ``with``."""

    @abstractmethod
    def agree(self, position: Position, interrupts: HeldInterrupts) -> None:
        """Go on only if no rank failed or was interrupted until here; from here on none delivers interrupts.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else.
            PeerInterrupt: A rank was interrupted.
        """

    @abstractmethod
    def commit(self, interrupts: HeldInterrupts) -> None:
        """Hold every interrupt from here to the end; what follows a meeting follows it on all ranks."""


class NoMeeting(Meeting):
    """Of a process that is alone."""

    def begin(self) -> None:
        """Do nothing."""

    def state_loaded(self) -> None:
        """Do nothing."""

    def telling(self) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING

    def agree(self, position: Position, interrupts: HeldInterrupts) -> None:  # noqa: ARG002 - nobody to ask
        """Agree with oneself, once interrupts that came are delivered."""
        interrupts.commit()

    def commit(self, interrupts: HeldInterrupts) -> None:
        """Deliver what came, and hold what comes."""
        interrupts.commit()


class RankMeeting(Meeting):
    """Of several processes.

    Args:
        communicator: Joins them.
        alike: Compares what must be alike.
    """

    def __init__(self, communicator: Communicator, alike: Alikeness) -> None:
        self._communicator = communicator
        self._alike = alike
        self._failed = False
        self.riders = Riders(communicator.rank, communicator.size)
        """What travels with the messages."""
        self.overlap = Overlap(communicator)
        """What travels before them."""

    def begin(self) -> None:
        """Forget how the last update ended; before the first one compare the ranks.

        Raises:
            DisagreementError: They are not alike.
        """
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
        self, position: Position, account: Mapping[str, Any], *, again: bool = False
    ) -> list[Mapping[str, Any]] | None:
        """Bring an account to every rank.

        Args:
            position: What must be the same on all ranks.
            account: Anything that JSON knows.
            again: Whether this rank's part has to be made anew.

        What the ranks do together because of it is part of the meeting, until `part`.

        Returns:
            The accounts of all ranks in order; None where a rank has to make its part anew, and so all do.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else, or its state is another.
            PeerInterrupt: A rank was interrupted.
        """
        message = {"position": position, "again": again, "account": account, "state": self._alike.digest()}
        # What is raised from here on, the others raise as well, or cannot be told.
        self._failed = True
        said = self._exchange(message)
        for rank, each in enumerate(said):
            _raise_if_failed(rank, each)
        _check_positions([each["position"] for each in said])
        self._alike.check([each["state"] for each in said])
        anew = self.overlap.judge([each["sum"] for each in said])
        return None if anew or any(each["again"] for each in said) else [each["account"] for each in said]

    def part(self) -> None:
        """End a meeting: what a rank raises from here on, it has to tell the others at the next."""
        self._failed = False

    def agree(self, position: Position, interrupts: HeldInterrupts) -> None:
        """Meet without an account; see `Meeting.agree`."""
        interrupts.check()
        self.meet(position, {})
        self.overlap.learn(None)
        self.part()
        interrupts.hold()

    def commit(self, interrupts: HeldInterrupts) -> None:
        """Hold every interrupt: the other ranks will not hear of one that comes now."""
        interrupts.hold()

    def _tell(self, error: BaseException) -> None:
        """Come to the meeting that the others are going to, and say what happened."""
        self._failed = True
        ended = isinstance(error, StopIteration)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        said = self._exchange(
            {
                "error": f"{type(error).__name__}: {error}",
                "traceback": text[-LONGEST_TRACEBACK:],
                "phase": self._communicator.watch.doing,
                "interrupt": isinstance(error, KeyboardInterrupt),
                "ended": ended,
            }
        )
        if ended and not all(each.get("ended") for each in said):
            _raise_ended(self._communicator.rank)

    def _exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        told = {**message, "sum": self.overlap.close()}
        payload = _BRIEF.encode(told).encode()
        # Room for riders also travels where there are none, or a rank would wait for what does not come.
        said = [json.loads(each) for each in self._communicator.exchange_with(payload, self.riders.table)]
        self.overlap.settle()
        return said


def _raise_if_failed(rank: int, said: Mapping[str, Any]) -> None:
    """Raise what a rank's message is about, if it is an error."""
    if "error" not in said:
        return
    if said["ended"]:
        _raise_ended(rank)
    if said["interrupt"]:
        raise PeerInterrupt(f"Rank {rank} was interrupted.", rank=rank)
    raise PeerError(
        f"Rank {rank} raised {said['error']}\nIts own traceback:\n{said['traceback'].rstrip()}",
        rank=rank,
        phase=said["phase"],
        traceback=said["traceback"],
    )


def _raise_ended(rank: int) -> None:
    raise DisagreementError(
        f"The batches of rank {rank} must end with those of the others, but end before. Give every rank the "
        "same iterator.",
        rank=rank,
        subject="batches",
    )


def _check_positions(positions: Sequence[Position]) -> None:
    """Refuse to go on with ranks that are somewhere else."""
    first = positions[0]
    for rank, position in enumerate(positions):
        for name in first.keys() | position.keys():
            here, there = first.get(name), position.get(name)
            if here != there:
                raise DisagreementError(
                    f"Rank {rank} must be where rank 0 is, but its {name} is {there} and not {here}. Run the "
                    "same code on every rank, and give it the same batches.",
                    rank=rank,
                    subject=name,
                    update=first.get("update"),
                )
