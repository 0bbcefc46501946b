"""Fire when an observed value is the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.metrics import Average
from lockstep.triggers.times import TriggerSpec, get_trigger
from lockstep.triggers.trigger import Progress, Trigger


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
