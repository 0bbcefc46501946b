"""The short forms in which a trigger may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lockstep.triggers.interval import Interval
from lockstep.triggers.position import Unit
from lockstep.triggers.trigger import Never, Progress, Trigger

TriggerSpec: TypeAlias = Trigger | tuple[float, Unit] | Callable[[Progress], bool] | None


class Call(Trigger):
    """Asks a function that keeps no state.

    Args:
        function: Called with the progress; returns whether to act.
    """

    def __init__(self, function: Callable[[Progress], bool]) -> None:
        self.function = function

    def __call__(self, progress: Progress) -> bool:
        """Return the function's answer."""
        return self.function(progress)

    def stays_fired(self, progress: Progress) -> bool:
        """Return the function's answer, which depends on nothing else."""
        return self.function(progress)


def get_trigger(spec: TriggerSpec, argument: str = "trigger") -> Trigger:
    """Return the trigger that a short form stands for.

    Args:
        spec: A `Trigger` is returned as it is; ``(period, unit)`` is an `Interval`; a function of
            the progress is asked each time, and nothing of it is saved; None never fires.
        argument: The name of the argument in error messages.

    Raises:
        TypeError: It is none of these.
        ValueError: The period or the unit is out of range.

    >>> get_trigger((2, "epoch")).period
    2
    """
    if isinstance(spec, Trigger):
        return spec
    if spec is None:
        return Never()
    if isinstance(spec, tuple):
        return Interval(*checked_pair(spec, argument))
    if callable(spec):
        return Call(spec)
    kinds = 'a Trigger, a pair such as (10, "epoch"), a function of the trainer or None'
    raise TypeError(f"`{argument}` must be {kinds}, got {spec!r}.")


def checked_pair(spec: tuple[Any, ...], argument: str) -> tuple[float, Unit]:
    """Return a pair of a number and a unit.

    Args:
        spec: The tuple to check.
        argument: The name of the argument in error messages.

    Raises:
        TypeError: If it is not such a pair.
    """
    if len(spec) != 2 or not isinstance(spec[0], (int, float)):  # noqa: PLR2004 - a pair
        raise TypeError(f'`{argument}` must be a pair such as (10, "epoch") where it is a tuple, got {spec!r}.')
    return spec[0], spec[1]
