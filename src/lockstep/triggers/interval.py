"""Fire at regular intervals."""

from __future__ import annotations

from lockstep.triggers.position import check_unit, num_completed, position
from lockstep.triggers.trigger import Progress, Trigger, Unit


class Interval(Trigger):
    """Fires whenever another period has been completed since the last call.

    With position x, position x' at the last call and period p, it fires if ``floor(x / p) != floor(x' / p)``.
    If several periods pass without a call, it fires once; and an epoch need not be a whole number of updates.

    Args:
        period: The period p, above 0: a whole number of iterations, or any number of epochs, samples or seconds.
        unit: The unit of the period: ``"iteration"`` (or ``"update"``), ``"epoch"``, ``"sample"`` or ``"second"``.

    Raises:
        ValueError: If the period or the unit is out of range.

    Determinism: with iterations and epochs, all processes fire at the same update; with seconds, each process
    reads its own clock.
    """

    _saved = ("previous",)

    def __init__(self, period: float, unit: Unit) -> None:
        check_unit(unit)
        if not period > 0:
            raise ValueError(f"`period` must be above 0, got {period}.")
        if unit in ("iteration", "update") and period != int(period):
            raise ValueError(f"`period` must be a whole number of iterations, got {period}.")
        self.period = period
        self.unit: Unit = unit
        self._previous: float | None = None

    def __repr__(self) -> str:
        return repr((self.period, self.unit))

    def __call__(self, progress: Progress) -> bool:
        """Return whether a period was completed since the last call."""
        current, previous = position(progress, self.unit), self._previous or 0
        self._previous = current
        return num_completed(current, self.period) != num_completed(previous, self.period)

    def initialize(self, progress: Progress) -> None:
        """Count periods from the current position, unless the trigger was called before."""
        if self._previous is None:
            self._previous = position(progress, self.unit)

    @property
    def limit(self) -> tuple[float, Unit]:
        """The end of the first period."""
        return self.period, self.unit

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether a period is completed."""
        return num_completed(position(progress, self.unit), self.period) > 0
