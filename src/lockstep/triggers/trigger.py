"""What a trigger is, and what it may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from lockstep.metrics import Observed
from lockstep.state import Stateful
from lockstep.updaters import Updater


class Progress(Protocol):
    """What a trigger sees of a run; a `lockstep.Trainer` is one."""

    @property
    def updater(self) -> Updater:
        """Who makes the updates, and counts them."""

    @property
    def observation(self) -> Mapping[str, Observed]:
        """What was observed in the last update and by the extensions that ran after it."""

    @property
    def elapsed_time(self) -> float:
        """How many seconds the run has taken, interruptions left out."""


class Trigger(Stateful, ABC):
    """Answers, once after each update or more rarely, whether it is time to act.

    Subclass it whenever the answer depends on earlier calls, so that the state is saved.
    """

    @abstractmethod
    def __call__(self, progress: Progress) -> bool:
        """Say whether to act now.

        Args:
            progress: The run as it stands; left untouched.
        """

    def initialize(self, progress: Progress) -> None:
        """Take note of where a run begins or goes on; nothing by default.

        Args:
            progress: The run before its next update; left untouched.
        """

    @property
    def finished(self) -> bool:
        """Whether it can never fire again."""
        return False

    def stays_fired(self, progress: Progress) -> bool:  # noqa: ARG002 - by default whatever the progress
        """Say whether a trigger that ended a run, as a loaded state tells, ends it by its own options too.

        Asked before the first update that follows a load. One whose options are a bound answers by these, so
        that a run goes on which is loaded with a later bound; by default what has fired stays fired.

        Args:
            progress: The run as it was when the trigger fired; left untouched, as the trigger is.
        """
        return True


class Never(Trigger):
    """Never fires."""

    def __call__(self, progress: Progress) -> bool:  # noqa: ARG002 - whatever the progress
        """Return False."""
        return False

    def stays_fired(self, progress: Progress) -> bool:  # noqa: ARG002 - as above
        """Return False."""
        return False
