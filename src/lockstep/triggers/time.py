"""Act when so many seconds have passed, and again after as many more."""

from __future__ import annotations

from lockstep.triggers.trigger import Progress, Trigger


class Time(Trigger):
    """Fires at a call later than its next appointment, which then moves on by one period.

    After a long pause it therefore fires at several calls in a row, until it has caught up;
    ``Interval(seconds, "second")`` fires once instead.

    Args:
        seconds: The period, more than 0.

    Raises:
        ValueError: It is not.

    Determinism: none; it reads this process's clock.
    """

    _saved = ("next",)

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"`seconds` must be more than 0, got {seconds}.")
        self.seconds = seconds
        self._next = seconds

    def __call__(self, progress: Progress) -> bool:
        """Say whether the appointment has passed."""
        if progress.elapsed_time <= self._next:
            return False
        self._next += self.seconds
        return True

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether the first appointment has passed."""
        return progress.elapsed_time > self.seconds
