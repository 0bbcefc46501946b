"""Triggers that follow an observed value: the best one so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from lockstep.arguments import Mode, check_mode, check_number
from lockstep.errors import warn
from lockstep.metrics import Average
from lockstep.triggers.times import TriggerSpec, get_trigger
from lockstep.triggers.trigger import Progress, Trigger, Unit, reached


class BestValue(Trigger):
    """Fires at the end of an interval if the mean of an observed value is better than in all earlier ones.

    The mean weights samples equally. The first interval always fires, unless its mean is NaN: NaN is never
    the best.

    Args:
        key: The name of the observed value, such as ``"validation/main/accuracy"``. The extension that observes
            it must have a higher priority than the extension with this trigger.
        compare: A function ``compare(best, new)`` that returns whether the new mean is better.
        trigger: The trigger that ends an interval.
    """

    _saved = ("best", "average", "trigger")

    def __init__(self, key: str, compare: Callable[[float, float], bool], trigger: TriggerSpec = (1, "epoch")) -> None:
        self.key = key
        self._compare = compare
        self._trigger = get_trigger(trigger)
        self._average = Average()
        self._best: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, trigger={self._trigger!r})"

    @property
    def best(self) -> float | None:
        """The best mean so far, or None before the first."""
        return self._best

    def __call__(self, progress: Progress) -> bool:
        """Add the observed value; at the end of an interval, return whether the mean is the best so far.

        Raises:
            KeyError: If the value was never observed in the interval.
        """
        if self.key in progress.observation:
            self._average.update(progress.observation[self.key])
        if not self._trigger(progress):
            return False
        mean = self._mean(progress)
        if math.isnan(mean) or (self._best is not None and not self._compare(self._best, mean)):
            return False
        self._best = mean
        return True

    def initialize(self, progress: Progress) -> None:
        """Start the first interval."""
        self._trigger.initialize(progress)

    def _mean(self, progress: Progress) -> float:
        """Return the mean over the interval that has ended, and start the next."""
        # The mean of no values is NaN, which would silently never be the best.
        if self._average.empty:
            observed = ", ".join(map(repr, sorted(progress.observation))) or "nothing"
            raise KeyError(f"`key` must be observed before its interval ends, got {self.key!r}; there is {observed}.")
        mean = self._average.compute()
        self._average.reset()
        return mean


class MinValue(BestValue):
    """Fires at the end of an interval if the mean of an observed value is the lowest so far.

    Args:
        key: The name of the observed value.
        trigger: The trigger that ends an interval.
    """

    def __init__(self, key: str, trigger: TriggerSpec = (1, "epoch")) -> None:
        super().__init__(key, lambda best, new: new < best, trigger)


class MaxValue(BestValue):
    """Fires at the end of an interval if the mean of an observed value is the highest so far.

    Args:
        key: The name of the observed value.
        trigger: The trigger that ends an interval.
    """

    def __init__(self, key: str, trigger: TriggerSpec = (1, "epoch")) -> None:
        super().__init__(key, lambda best, new: new > best, trigger)


@dataclass(eq=False, repr=False)
class EarlyStopping(Trigger):
    """Fires when an observed value has not improved for several checks, or when a limit is reached.

    Each check considers the mean since the last check, weighting samples equally. A mean that is strictly
    better than the best so far, by more than `min_delta`, becomes the best, and resets the count of checks without
    improvement. Otherwise, and for NaN, the count is incremented. The trigger fires at a check that finds the count
    at `patience` or more, or the mean beyond one of the thresholds.

    As in Chainer, the value must be observed at the time of a check. The first check at which it is not gives a
    warning; such checks are skipped, and the values so far count towards the next check. A run that is resumed with a
    later limit or with more patience continues.

    Args:
        monitor: The name of the observed value, such as ``"validation/main/loss"``.
        patience: The number of checks without improvement after which to stop, at least 1.
        mode: Whether lower (``"min"``) or higher (``"max"``) values are better; ``"auto"`` means ``"max"`` for a
            name that contains ``accuracy``, otherwise ``"min"``.
        check_trigger: The trigger of the checks; it must fire at updates at which the value is observed.
        max_trigger: The trigger of the limit, or None for no limit.
        min_delta: The change from the best mean that counts as an improvement if it is exceeded, at least 0.
        relative: Whether `min_delta` is a fraction of the magnitude of the best mean instead of a difference.
        stop_at: The mean at which to stop because it is good enough, or None.
        diverge_at: The mean beyond which to stop because the run diverges, or None.
        check_finite: Whether to stop at a mean that is infinite or NaN.
        min_epochs: The number of epochs before which only the limit ends the run, at least 0.

    Raises:
        ValueError: If a number or the mode is out of range.

    >>> stopping = EarlyStopping("validation/main/loss", patience=5, min_delta=0.01, relative=True, min_epochs=3)
    """

    _saved = ("best", "mean", "count", "average", "check_trigger", "max_trigger")

    monitor: str = "main/loss"
    _: KW_ONLY
    patience: int = 3
    mode: Mode = "auto"
    check_trigger: TriggerSpec = (1, "epoch")
    max_trigger: TriggerSpec = (100, "epoch")
    min_delta: float = 0.0
    relative: bool = False
    stop_at: float | None = None
    diverge_at: float | None = None
    check_finite: bool = False
    min_epochs: float = 0

    def __post_init__(self) -> None:
        check_number("patience", self.patience, least=1)
        self.mode = check_mode(self.mode, self.monitor)
        check_number("min_delta", self.min_delta, least=0)
        check_number("min_epochs", self.min_epochs, least=0)
        for name, bound in {"stop_at": self.stop_at, "diverge_at": self.diverge_at}.items():
            if bound is not None:
                check_number(name, bound)
        self._check_trigger = get_trigger(self.check_trigger)
        self._max_trigger = get_trigger(self.max_trigger)
        self._average = Average()
        self._best: float | None = None
        self._mean: float | None = None
        self._count = 0
        self._has_warned = False

    def __repr__(self) -> str:
        return f"EarlyStopping({self.monitor!r}, patience={self.patience}, mode={self.mode!r})"

    @property
    def best(self) -> float | None:
        """The best mean so far, or None before the first check with a value."""
        return self._best

    @property
    def count(self) -> int:
        """The number of consecutive checks without improvement."""
        return self._count

    def __call__(self, progress: Progress) -> bool:
        """Add the observed value, check it if a check is due, and return whether to stop."""
        if self.monitor in progress.observation:
            self._average.update(progress.observation[self.monitor])
        stops = self._check_trigger(progress) and self._check(progress)
        # First in the `or`, so that it is called every time: a trigger must see all updates.
        return self._max_trigger(progress) or stops

    def initialize(self, progress: Progress) -> None:
        """Start the triggers of the checks and of the limit."""
        self._check_trigger.initialize(progress)
        self._max_trigger.initialize(progress)

    @property
    def limit(self) -> tuple[float, Unit] | None:
        """The limit of `max_trigger`."""
        return self._max_trigger.limit

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether the last check stops the run with the current options, or the limit is reached."""
        return self._stops(progress) or self._max_trigger.stays_fired(progress)

    def _check(self, progress: Progress) -> bool:
        """Compare the mean since the last check with the best, and return whether to stop."""
        if self.monitor not in progress.observation:
            if not self._has_warned:
                observed = ", ".join(map(repr, sorted(progress.observation))) or "nothing"
                warn(
                    f"{self.monitor!r} was not observed at this check for early stopping, which is skipped; there is "
                    f"{observed}. Name one of these, or pass a `check_trigger` that fires when it is observed. This "
                    "warning is given once."
                )
                self._has_warned = True
            return False
        self._mean = self._average.compute()
        self._average.reset()
        if self._improves(self._mean):
            self._best, self._count = self._mean, 0
        else:
            self._count += 1
        return self._stops(progress)

    def _stops(self, progress: Progress) -> bool:
        """Return whether the patience is exhausted, or the last mean is beyond a threshold."""
        if not reached(progress.updater.epoch_detail, self.min_epochs):
            return False
        return self._count >= self.patience or (self._mean is not None and self._is_beyond(self._mean))

    def _is_beyond(self, mean: float) -> bool:
        """Return whether a mean is good enough, diverges, or is not finite and must be."""
        if self.check_finite and not math.isfinite(mean):
            return True
        # With the sign of the mode, larger is better. Comparisons with NaN are false.
        sign = 1.0 if self.mode == "max" else -1.0
        is_good = self.stop_at is not None and sign * mean >= sign * self.stop_at
        return is_good or (self.diverge_at is not None and sign * mean < sign * self.diverge_at)

    def _improves(self, mean: float) -> bool:
        """Return whether a mean is better than the best so far by more than the smallest change that counts."""
        # Compared with an infinity at first, so that a first mean of NaN is no improvement either.
        best = self._best
        if best is None:
            return mean > float("-inf") if self.mode == "max" else mean < float("inf")
        # With a change of 0, the comparison is that of the means themselves.
        delta = self.min_delta * abs(best) if self.relative else self.min_delta
        return mean > best + delta if self.mode == "max" else mean < best - delta
