"""Triggers that depend on how far a run has come, and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

from lockstep.arguments import check_choice, check_number
from lockstep.state import check_keys
from lockstep.triggers.trigger import AnyOf, Never, Progress, Trigger, Unit, num_completed, position, reached


class _Passing(Trigger):
    """A trigger that compares the position of a run with that at the last call.

    Args:
        unit: The unit of the position.

    Raises:
        ValueError: If the unit is unknown.
    """

    _saved = ("previous",)

    def __init__(self, unit: Unit) -> None:
        check_choice("unit", unit, get_args(Unit))
        self.unit: Unit = unit
        self._previous: float | None = None

    def initialize(self, progress: Progress) -> None:
        """Leave out what was passed before the current position, unless the trigger was called before."""
        if self._previous is None:
            self._previous = position(progress, self.unit)

    def _move(self, progress: Progress) -> tuple[float, float]:
        """Return the position at the last call, and the current one."""
        previous, self._previous = self._previous or 0, position(progress, self.unit)
        return previous, self._previous


class Interval(_Passing):
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

    def __init__(self, period: float, unit: Unit) -> None:
        super().__init__(unit)
        check_number("period", period, above=0)
        if unit in ("iteration", "update") and period != int(period):
            raise ValueError(f"`period` must be a whole number of iterations, got {period}.")
        self.period = period

    def __repr__(self) -> str:
        return repr((self.period, self.unit))

    def __call__(self, progress: Progress) -> bool:
        """Return whether a period was completed since the last call."""
        previous, current = self._move(progress)
        return num_completed(current, self.period) != num_completed(previous, self.period)

    @property
    def limit(self) -> tuple[float, Unit]:
        """The end of the first period."""
        return self.period, self.unit

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether a period is completed."""
        return num_completed(position(progress, self.unit), self.period) > 0


class ManualSchedule(_Passing):
    """Fires if at least one of its points has been passed since the last call.

    A point counts as passed when the position of a run equals it.

    Args:
        points: One point or a sequence of points in any order, each above 0.
        unit: The unit of the points: ``"iteration"`` (or ``"update"``), ``"epoch"``, ``"sample"`` or ``"second"``.

    Raises:
        ValueError: If there is no point, one is out of range, or the unit is unknown.
    """

    def __init__(self, points: float | Sequence[float], unit: Unit) -> None:
        super().__init__(unit)
        several = points if isinstance(points, Sequence) else [points]
        if not several or not all(point > 0 for point in several):
            raise ValueError(f"`points` must be one or more numbers above 0, got {points}.")
        self.points = tuple(sorted(several))

    def __call__(self, progress: Progress) -> bool:
        """Return whether a point was passed since the last call."""
        previous, current = self._move(progress)
        return any(reached(current, point) and not reached(previous, point) for point in self.points)

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether a point has been passed."""
        return reached(position(progress, self.unit), self.points[0])

    @property
    def finished(self) -> bool:
        """Whether the last point has been passed."""
        return reached(self._previous or 0, self.points[-1])


class Time(Trigger):
    """Fires at a call that is later than its due time, and then adds one period to the due time.

    After a long pause it therefore fires at several calls in a row until the due time has caught up;
    ``Interval(seconds, "second")`` fires only once.

    Args:
        seconds: The period in seconds, above 0.

    Raises:
        ValueError: If the period is not above 0.

    Determinism: none; it reads the clock of this process.
    """

    _saved = ("next",)

    def __init__(self, seconds: float) -> None:
        check_number("seconds", seconds, above=0)
        self.seconds = seconds
        self._next = seconds

    def __call__(self, progress: Progress) -> bool:
        """Return whether the due time has passed."""
        if progress.elapsed_time <= self._next:
            return False
        # From the due time and not from now, or the delay of each call would add up.
        self._next += self.seconds
        return True

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether the first period has passed."""
        return progress.elapsed_time > self.seconds


class Once(Trigger):
    """Fires at its first call.

    Args:
        call_on_resume: Whether it also fires at the first call after a saved state was loaded.
    """

    _saved = ("fired",)

    def __init__(self, *, call_on_resume: bool = False) -> None:
        self.call_on_resume = call_on_resume
        self._fired = False

    def __call__(self, progress: Progress) -> bool:  # noqa: ARG002 - independent of the progress
        """Return whether this is the first call."""
        first, self._fired = not self._fired, True
        return first

    @property
    def finished(self) -> bool:
        """Whether it has fired."""
        return self._fired

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; with ``call_on_resume``, the trigger can fire again."""
        super().load_state_dict(state)
        self._fired = self._fired and not self.call_on_resume


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
        ValueError: If the unit is unknown.
    """
    if len(spec) != 2 or not isinstance(spec[0], (int, float)):  # noqa: PLR2004 - a pair
        raise TypeError(
            f'`{argument}` must be a pair such as (10, "epoch"), of a Python number and a unit, got {spec!r}.'
        )
    check_choice(f"{argument}[1]", spec[1], get_args(Unit))
    return spec[0], spec[1]


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
        check_choice("unit", unit, get_args(Unit))
        check_number("bound", bound, least=0)
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


class Latch(AnyOf):
    """Calls another trigger at most once per iteration, and stays fired once that has fired.

    A run that has ended therefore stays ended, and a trigger that averages does not see the same observation
    twice when a run is interrupted and resumed. A run that is resumed with a later bound continues, see
    `Trigger.stays_fired`.

    Args:
        trigger: The trigger to call.
    """

    def __init__(self, trigger: Trigger) -> None:
        super().__init__(trigger)
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
