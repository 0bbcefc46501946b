"""When a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.state import check_keys
from lockstep.triggers.position import Unit, check_unit, position, reached
from lockstep.triggers.spec import TriggerSpec, checked_pair, get_trigger
from lockstep.triggers.trigger import Progress, Trigger


class Until(Trigger):
    """Fires from a bound on, at every call.

    It keeps no state, so a finished run that is resumed with a later bound goes on, and one that
    is resumed with the same bound does nothing.

    Args:
        bound: At least 0.
        unit: ``"iteration"`` (also called ``"update"``), ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: The bound or the unit is out of range.
    """

    def __init__(self, bound: float, unit: Unit) -> None:
        check_unit(unit)
        if not bound >= 0:
            raise ValueError(f"`bound` must be at least 0, got {bound}.")
        self.bound = bound
        self.unit: Unit = unit

    def __repr__(self) -> str:
        return repr((self.bound, self.unit))

    def __call__(self, progress: Progress) -> bool:
        """Say whether the bound is reached."""
        return reached(position(progress, self.unit), self.bound)

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether the bound is reached."""
        return self(progress)


class Latch(Trigger):
    """Asks another trigger at most once per iteration, and stays fired once it has fired.

    So a run that has ended stays ended, and one that is interrupted and goes on does not show
    the same observation twice to a trigger that averages. A run that is loaded with a later bound
    goes on: see `Trigger.stays_fired`.

    Args:
        trigger: Who is asked.
    """

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self._fired = False
        self._loaded = False
        self._asked_at: int | None = None

    def __repr__(self) -> str:
        return repr(self.trigger)

    def __call__(self, progress: Progress) -> bool:
        """Say whether the other trigger has ever fired."""
        iteration = progress.updater.iteration
        if self._loaded:
            self._fired = self._fired and self.trigger.stays_fired(progress)
            self._loaded = False
        if not self._fired and iteration != self._asked_at:
            self._fired = self.trigger(progress)
            self._asked_at = iteration
        return self._fired

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether the other trigger does."""
        return self.trigger.stays_fired(progress)

    def initialize(self, progress: Progress) -> None:
        """Start the other trigger."""
        self.trigger.initialize(progress)

    @property
    def finished(self) -> bool:
        """Whether the other one can never fire again."""
        return self.trigger.finished

    def state_dict(self) -> dict[str, object]:
        """Return the answer so far, when it was asked for, and the other trigger's state."""
        return {"fired": self._fired, "asked_at": self._asked_at, "trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        check_keys(state, ("fired", "asked_at", "trigger"), of="Latch")
        self.trigger.load_state_dict(state["trigger"])
        self._fired, self._asked_at = state["fired"], state["asked_at"]
        self._loaded = True


def get_until(spec: TriggerSpec) -> Trigger:
    """Return the trigger that ends a run.

    Args:
        spec: ``(bound, unit)`` is an `Until`; anything else is what `get_trigger` makes of it, in a
            `Latch`; None never ends.

    Raises:
        TypeError: It is no trigger.
        ValueError: The bound or the unit is out of range.

    >>> get_until((10, "epoch")).bound
    10
    """
    return Until(*checked_pair(spec, "until")) if isinstance(spec, tuple) else Latch(get_trigger(spec, "until"))
