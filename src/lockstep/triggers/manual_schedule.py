"""Act at given points."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.triggers.position import Unit, check_unit, position, reached
from lockstep.triggers.trigger import Progress, Trigger


class ManualSchedule(Trigger):
    """Fires when at least one of its points lies after the position of the last call and not after this one.

    Args:
        points: One point or several, in any order; each more than 0.
        unit: ``"iteration"`` (also called ``"update"``), ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: There is no point, one is out of range, or the unit is none.
    """

    _saved = ("previous",)

    def __init__(self, points: float | Sequence[float], unit: Unit) -> None:
        check_unit(unit)
        several = points if isinstance(points, Sequence) else [points]
        if not several or not all(point > 0 for point in several):
            raise ValueError(f"`points` must be at least one number more than 0, got {points}.")
        self.points = tuple(sorted(several))
        self.unit: Unit = unit
        self._previous: float | None = None

    def __call__(self, progress: Progress) -> bool:
        """Say whether a point was passed since the last call."""
        place, previous = position(progress, self.unit), self._previous or 0
        self._previous = place
        return any(reached(place, point) and not reached(previous, point) for point in self.points)

    def initialize(self, progress: Progress) -> None:
        """Count from here, unless it was asked before: points already passed are past."""
        if self._previous is None:
            self._previous = position(progress, self.unit)

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether a point is passed."""
        return reached(position(progress, self.unit), self.points[0])

    @property
    def finished(self) -> bool:
        """Whether the last point has been passed."""
        return reached(self._previous or 0, self.points[-1])
