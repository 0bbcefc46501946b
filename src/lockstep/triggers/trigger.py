"""The interface of triggers, and of the run that they observe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from lockstep.metrics import Observed
from lockstep.state import Stateful
from lockstep.updaters import Updater


class Progress(Protocol):
    """The parts of a run that a trigger can read; a `lockstep.Trainer` is one."""

    @property
    def updater(self) -> Updater:
        """The updater, which runs and counts the updates."""

    @property
    def observation(self) -> Mapping[str, Observed]:
        """The values observed in the last update and by the extensions that ran after it."""

    @property
    def elapsed_time(self) -> float:
        """The duration of the run in seconds, without the time between an interruption and a resume."""


class Trigger(Stateful, ABC):
    """Decides whether to act now; called once after each update, or less often.

    Subclass it if the decision depends on earlier calls, so that the state is saved.
    """

    @abstractmethod
    def __call__(self, progress: Progress) -> bool:
        """Return whether to act now.

        Args:
            progress: The current state of the run; left untouched.
        """

    def initialize(self, progress: Progress) -> None:
        """Prepare for a run that starts or resumes; does nothing by default.

        Args:
            progress: The run before its next update; left untouched.
        """

    @property
    def finished(self) -> bool:
        """Whether it can never fire again."""
        return False

    def stays_fired(self, progress: Progress) -> bool:  # noqa: ARG002 - by default independent of the progress
        """Return whether a trigger that had ended a run still ends it with its current options.

        Called before the first update after loading a state. A trigger with a bound decides by the bound, so that a
        run that is resumed with a later one continues; by default a trigger that has fired stays fired.

        Args:
            progress: The run as it was when the trigger fired; left untouched, as is the trigger.
        """
        return True


class Never(Trigger):
    """A trigger that never fires."""

    def __repr__(self) -> str:
        return "Never()"

    def __call__(self, progress: Progress) -> bool:  # noqa: ARG002 - independent of the progress
        """Return False."""
        return False

    def stays_fired(self, progress: Progress) -> bool:  # noqa: ARG002 - as above
        """Return False."""
        return False
