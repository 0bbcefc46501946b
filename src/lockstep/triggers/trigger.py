"""The interface of triggers, and of the run that they observe."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from lockstep.metrics import Observed
from lockstep.state import Stateful, check_keys, load_all
from lockstep.updaters import Updater

Unit: TypeAlias = Literal["iteration", "update", "epoch", "sample", "second"]
"""``"iteration"`` and ``"update"`` both count updates; ``"sample"`` counts samples over all epochs; ``"second"`` is the
elapsed time of the run."""


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

    Subclass it if the decision depends on earlier calls, so that the state is saved. Two triggers can be combined:
    ``a & b`` is `AllOf`, and ``a | b`` is `AnyOf`.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __and__(self, other: object) -> AllOf:
        return AllOf(self, other) if isinstance(other, Trigger) else NotImplemented

    def __or__(self, other: object) -> AnyOf:
        return AnyOf(self, other) if isinstance(other, Trigger) else NotImplemented

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

    @property
    def limit(self) -> tuple[float, Unit] | None:
        """The position by which it has ended a run at the latest, with its unit; None if that is not known."""
        return None

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

    def __call__(self, progress: Progress) -> bool:  # noqa: ARG002 - independent of the progress
        """Return False."""
        return False

    def stays_fired(self, progress: Progress) -> bool:  # noqa: ARG002 - as above
        """Return False."""
        return False


class Combined(Trigger):
    """The base class of triggers that call several others, each of them every time, because each must see all updates.

    Args:
        *triggers: The triggers, at least one, none of them twice.

    Raises:
        TypeError: If one is not a trigger.
        ValueError: If there is none, or one is given twice.
    """

    def __init__(self, *triggers: Trigger) -> None:
        for trigger in triggers:
            if not isinstance(trigger, Trigger):
                raise TypeError(
                    f'`triggers` must be Trigger objects, got {trigger!r}. Use triggers.Interval(1, "epoch") or '
                    'triggers.Until(1, "epoch") instead of a pair.'
                )
        if not triggers or len(set(map(id, triggers))) < len(triggers):
            raise ValueError(f"`triggers` must be at least one trigger, and none of them twice, got {triggers!r}.")
        self.triggers = triggers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.triggers))})"

    def __call__(self, progress: Progress) -> bool:
        """Call all triggers, and return whether those have fired that must."""
        # First all of them: `all` would leave out those after the first that does not fire.
        fired = [trigger(progress) for trigger in self.triggers]
        return self._fires(fired)

    @property
    def finished(self) -> bool:
        """Whether this trigger can never fire again."""
        # What needs all triggers ends with the first of them, and what needs one ends with the last.
        return not self._fires(not trigger.finished for trigger in self.triggers)

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether those triggers stay fired that must."""
        return self._fires(trigger.stays_fired(progress) for trigger in self.triggers)

    @staticmethod
    @abstractmethod
    def _fires(fired: Iterable[bool], /) -> bool:
        """Return whether this trigger fires, given which of its triggers do."""

    def initialize(self, progress: Progress) -> None:
        """Initialize all triggers."""
        for trigger in self.triggers:
            trigger.initialize(progress)

    def state_dict(self) -> dict[str, object]:
        """Return the state of each trigger."""
        return {str(index): trigger.state_dict() for index, trigger in enumerate(self.triggers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        check_keys(state, map(str, range(len(self.triggers))), of=type(self).__name__)
        load_all([(trigger, state[str(index)]) for index, trigger in enumerate(self.triggers)])


class AllOf(Combined):
    """Fires when all of several triggers fire at the same call.

    >>> AllOf(Never(), Never())
    AllOf(Never(), Never())
    """

    _fires = staticmethod(all)


class AnyOf(Combined):
    """Fires when at least one of several triggers fires."""

    _fires = staticmethod(any)

    @property
    def limit(self) -> tuple[float, Unit] | None:
        """The first known limit of a trigger."""
        return next((trigger.limit for trigger in self.triggers if trigger.limit), None)


def position(progress: Progress, unit: Unit) -> float:
    """Return the position of a run in a unit.

    Raises:
        ValueError: If the unit is ``"sample"`` and the iterator does not count samples.

    Determinism: iterations, epochs and samples are equal on all processes of a run. Seconds are not: do not let
    anything that all processes must do together depend on them.
    """
    if unit == "epoch":
        return progress.updater.epoch_detail
    if unit == "second":
        return progress.elapsed_time
    if unit == "sample":
        passed = progress.updater.samples_passed
        if passed is None:
            kind = type(progress.updater.get_iterator("main")).__name__
            raise ValueError(
                f"`unit` must not be 'sample' for an iterator that counts batches, got a {kind}. Use 'iteration' or "
                "'epoch', or a lockstep.BatchIterator."
            )
        return passed
    return progress.updater.iteration


def reached(current: float, point: float) -> bool:
    """Return whether a position is at a point or beyond it, up to rounding errors.

    >>> 0.1 + 0.2 >= 0.3, 0.7 + 0.1 >= 0.8, reached(0.7 + 0.1, 0.8)
    (True, False, True)
    """
    return current >= point or _is_close(current, point)


def num_completed(current: float, period: float) -> int:
    """Count the periods that are completed at a position, up to rounding errors.

    >>> math.floor(0.3 / 0.1), num_completed(0.3, 0.1)
    (2, 3)
    """
    # Counts of updates and epochs are exact, and are compared in every update.
    if type(current) is int and type(period) is int:
        return current // period
    nearest = round(current / period)
    return nearest if _is_close(current / period, nearest) else math.floor(current / period)


def _is_close(a: float, b: float) -> bool:
    """Return whether two positions are equal up to rounding errors."""
    # A billionth of an epoch is less than one sample, and the rounding error of a million additions is less than that.
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9)
