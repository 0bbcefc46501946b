"""Fire when a number of seconds has passed, and again each time as many more have passed."""

from __future__ import annotations

from lockstep.triggers.trigger import Progress, Trigger


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
        if not seconds > 0:
            raise ValueError(f"`seconds` must be above 0, got {seconds}.")
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
