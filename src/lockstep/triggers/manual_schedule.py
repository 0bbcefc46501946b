"""Fire at given points of a run."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.triggers.position import check_unit, position, reached
from lockstep.triggers.trigger import Progress, Trigger, Unit


class ManualSchedule(Trigger):
    """Fires if at least one of its points has been passed since the last call.

    A point counts as passed when the position of a run equals it.

    Args:
        points: One point or a sequence of points in any order, each above 0.
        unit: The unit of the points: ``"iteration"`` (or ``"update"``), ``"epoch"``, ``"sample"`` or ``"second"``.

    Raises:
        ValueError: If there is no point, one is out of range, or the unit is unknown.
    """

    _saved = ("previous",)

    def __init__(self, points: float | Sequence[float], unit: Unit) -> None:
        check_unit(unit)
        several = points if isinstance(points, Sequence) else [points]
        if not several or not all(point > 0 for point in several):
            raise ValueError(f"`points` must be one or more numbers above 0, got {points}.")
        self.points = tuple(sorted(several))
        self.unit: Unit = unit
        self._previous: float | None = None

    def __call__(self, progress: Progress) -> bool:
        """Return whether a point was passed since the last call."""
        current, previous = position(progress, self.unit), self._previous or 0
        self._previous = current
        return any(reached(current, point) and not reached(previous, point) for point in self.points)

    def initialize(self, progress: Progress) -> None:
        """Skip the points before the current position, unless the trigger was called before."""
        if self._previous is None:
            self._previous = position(progress, self.unit)

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether a point has been passed."""
        return reached(position(progress, self.unit), self.points[0])

    @property
    def finished(self) -> bool:
        """Whether the last point has been passed."""
        return reached(self._previous or 0, self.points[-1])
