"""Act at regular intervals."""

from __future__ import annotations

from lockstep.triggers.position import Unit, check_unit, completed, position
from lockstep.triggers.trigger import Progress, Trigger


class Interval(Trigger):
    """Fires whenever another period has been completed since it was last asked.

    With position x, previous position x' and period p it fires if ``floor(x / p) != floor(x' / p)``.
    So it fires once after several periods without a call, and epochs need not be whole
    numbers of updates.

    Args:
        period: p, more than 0; a whole number of iterations, any number of epochs or seconds.
        unit: ``"iteration"`` (also called ``"update"``), ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: The period or the unit is out of range.

    Determinism: in iterations and epochs every process fires at the same update; in seconds
    each by its own clock.
    """

    _saved = ("previous",)

    def __init__(self, period: float, unit: Unit) -> None:
        check_unit(unit)
        if not period > 0:
            raise ValueError(f"`period` must be more than 0, got {period}.")
        if unit in ("iteration", "update") and period != int(period):
            raise ValueError(f"`period` must be a whole number of iterations, got {period}.")
        self.period = period
        self.unit: Unit = unit
        self._previous: float | None = None

    def __call__(self, progress: Progress) -> bool:
        """Say whether a period was completed since the last call."""
        place, previous = position(progress, self.unit), self._previous or 0
        self._previous = place
        return completed(place, self.period) != completed(previous, self.period)

    def initialize(self, progress: Progress) -> None:
        """Count from here, unless it was asked before: what came earlier is no completed period."""
        if self._previous is None:
            self._previous = position(progress, self.unit)

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether a period is completed."""
        return completed(position(progress, self.unit), self.period) > 0
