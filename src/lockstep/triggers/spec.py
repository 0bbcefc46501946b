"""The short forms in which you can pass a trigger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lockstep.triggers.times import Interval
from lockstep.triggers.trigger import Never, Progress, Trigger, Unit

TriggerSpec: TypeAlias = Trigger | tuple[float, Unit] | Callable[[Progress], bool] | None


class FunctionTrigger(Trigger):
    """Fires when a function returns True; it has no state.

    Args:
        function: A function that takes the progress and returns whether to fire.
    """

    def __init__(self, function: Callable[[Progress], bool]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def __call__(self, progress: Progress) -> bool:
        """Return the result of the function."""
        return self.function(progress)

    def stays_fired(self, progress: Progress) -> bool:
        """Return the result of the function, which depends on the progress alone."""
        return self.function(progress)


def get_trigger(spec: TriggerSpec, argument: str = "trigger") -> Trigger:
    """Return the trigger for a short form.

    Args:
        spec: A `Trigger`, which is returned unchanged; a pair ``(period, unit)`` for an `Interval`; a function
            of the progress, which is called each time and has no saved state; or None for a trigger that never
            fires.
        argument: The name of the argument in error messages.

    Raises:
        TypeError: If it is none of these.
        ValueError: If the period or the unit is out of range.

    >>> get_trigger((2, "epoch")).period
    2
    """
    # First, because a trigger is callable too.
    if isinstance(spec, Trigger):
        return spec
    if spec is None:
        return Never()
    if isinstance(spec, tuple):
        return Interval(*check_pair(spec, argument))
    if isinstance(spec, type):
        raise TypeError(f"`{argument}` must be an object, got the class {spec.__name__}. Create one of it.")
    if callable(spec):
        return FunctionTrigger(spec)
    kinds = 'a Trigger, a pair such as (10, "epoch"), a function of the trainer or None'
    raise TypeError(f"`{argument}` must be {kinds}, got {spec!r}.")


def check_pair(spec: tuple[Any, ...], argument: str) -> tuple[float, Unit]:
    """Check that a tuple is a pair of a number and a unit, and return it.

    Args:
        spec: The tuple to check.
        argument: The name of the argument in error messages.

    Raises:
        TypeError: If it is not such a pair.
    """
    if len(spec) != 2 or not isinstance(spec[0], (int, float)):  # noqa: PLR2004 - a pair
        raise TypeError(f'`{argument}` must be a pair such as (10, "epoch") where it is a tuple, got {spec!r}.')
    return spec[0], spec[1]
