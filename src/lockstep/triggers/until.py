"""Triggers that end a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.state import check_keys
from lockstep.triggers.times import TriggerSpec, check_pair, get_trigger
from lockstep.triggers.trigger import Progress, Trigger, Unit, check_unit, position, reached


class Until(Trigger):
    """Fires at every call from a bound on.

    It has no state: a finished run that is resumed with a later bound continues, and one that is resumed with
    the same bound does nothing.

    Args:
        bound: The position at which the run ends, at least 0.
        unit: The unit of the bound: ``"iteration"`` (or ``"update"``), ``"epoch"``, ``"sample"`` or ``"second"``.

    Raises:
        ValueError: If the bound or the unit is out of range.
    """

    def __init__(self, bound: float, unit: Unit) -> None:
        check_unit(unit)
        if not bound >= 0:
            raise ValueError(f"`bound` must be at least 0, got {bound}.")
        self.bound = bound
        self.unit: Unit = unit

    def __repr__(self) -> str:
        return repr((self.bound, self.unit))

    @property
    def limit(self) -> tuple[float, Unit]:
        """The bound and its unit."""
        return self.bound, self.unit

    def __call__(self, progress: Progress) -> bool:
        """Return whether the bound is reached."""
        return reached(position(progress, self.unit), self.bound)

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether the bound is reached."""
        return self(progress)


class Latch(Trigger):
    """Calls another trigger at most once per iteration, and stays fired once that has fired.

    A run that has ended therefore stays ended, and a trigger that averages does not see the same observation
    twice when a run is interrupted and resumed. A run that is resumed with a later bound continues, see
    `Trigger.stays_fired`.

    Args:
        trigger: The trigger to call.
    """

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self._fired = False
        self._loaded = False
        self._asked_at: int | None = None

    def __repr__(self) -> str:
        return repr(self.trigger)

    def __call__(self, progress: Progress) -> bool:
        """Return whether the other trigger has ever fired."""
        iteration = progress.updater.iteration
        # Not when the state is loaded: the progress is known only once all parts of the run have been loaded.
        if self._loaded:
            self._fired = self._fired and self.trigger.stays_fired(progress)
            self._loaded = False
        # Once per iteration, also after a resume: the observation is the same, and would be averaged twice.
        if not self._fired and iteration != self._asked_at:
            self._fired = self.trigger(progress)
            self._asked_at = iteration
        return self._fired

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether the other trigger stays fired."""
        return self.trigger.stays_fired(progress)

    def initialize(self, progress: Progress) -> None:
        """Initialize the other trigger."""
        self.trigger.initialize(progress)

    @property
    def limit(self) -> tuple[float, Unit] | None:
        """The limit of the other trigger."""
        return self.trigger.limit

    @property
    def finished(self) -> bool:
        """Whether the other trigger can never fire again."""
        return self.trigger.finished

    def state_dict(self) -> dict[str, object]:
        """Return whether it has fired, the iteration of its last call, and the state of the other trigger."""
        return {"fired": self._fired, "asked_at": self._asked_at, "trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        check_keys(state, ("fired", "asked_at", "trigger"), of="Latch")
        self.trigger.load_state_dict(state["trigger"])
        self._fired, self._asked_at = state["fired"], state["asked_at"]
        self._loaded = True


def get_until(spec: TriggerSpec) -> Trigger:
    """Return the trigger that ends a run.

    Args:
        spec: A pair ``(bound, unit)`` for an `Until`, or any other argument of `get_trigger`, whose result is
            wrapped in a `Latch`. With None, the run does not end.

    Raises:
        TypeError: If it is not a trigger.
        ValueError: If the bound or the unit is out of range.

    >>> get_until((10, "epoch")).bound
    10
    """
    return Until(*check_pair(spec, "until")) if isinstance(spec, tuple) else Latch(get_trigger(spec, "until"))
