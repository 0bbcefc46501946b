"""Stop a run that no longer improves."""

from __future__ import annotations

import warnings
from typing import Literal

from lockstep.metrics import Average
from lockstep.triggers.spec import TriggerSpec, get_trigger
from lockstep.triggers.trigger import Progress, Trigger


class EarlyStopping(Trigger):
    """Fires when an observed value has not improved for several checks, or when a limit is reached.

    Each check considers the mean since the last check, weighting samples equally. A mean that is strictly
    better than the best so far becomes the best, and resets the count of checks without improvement. Otherwise,
    and for NaN, the count is incremented. The trigger fires at a check that finds the count at `patience` or more.

    As in Chainer, the value must be observed at the time of a check. A check at which it is not gives a warning
    and is skipped, and the values so far count towards the next check. A run that is resumed with a later limit
    or with more patience continues.

    Args:
        monitor: The name of the observed value, such as ``"validation/main/loss"``.
        patience: The number of checks without improvement after which to stop, at least 1.
        mode: Whether lower (``"min"``) or higher (``"max"``) values are better; ``"auto"`` means ``"max"`` for a
            name that contains ``accuracy``, otherwise ``"min"``.
        check_trigger: The trigger of the checks; it must fire at updates at which the value is observed.
        max_trigger: The trigger of the limit, or None for no limit.

    Raises:
        ValueError: If the patience or the mode is out of range.
    """

    _saved = ("best", "count", "average", "check_trigger", "max_trigger")

    def __init__(
        self,
        monitor: str = "main/loss",
        *,
        patience: int = 3,
        mode: Literal["auto", "min", "max"] = "auto",
        check_trigger: TriggerSpec = (1, "epoch"),
        max_trigger: TriggerSpec = (100, "epoch"),
    ) -> None:
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {patience}.")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"`mode` must be one of 'auto', 'min', 'max', got {mode!r}.")
        self.monitor = monitor
        self.patience = patience
        self.mode = ("max" if "accuracy" in monitor else "min") if mode == "auto" else mode
        self._check_trigger = get_trigger(check_trigger)
        self._max_trigger = get_trigger(max_trigger)
        self._average = Average()
        self._best: float | None = None
        self._count = 0

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
        out_of_patience = self._check_trigger(progress) and self._check(observed=self.monitor in progress.observation)
        # First in the `or`, so that it is called every time: a trigger must see all updates.
        return self._max_trigger(progress) or out_of_patience

    def initialize(self, progress: Progress) -> None:
        """Start the triggers of the checks and of the limit."""
        self._check_trigger.initialize(progress)
        self._max_trigger.initialize(progress)

    def stays_fired(self, progress: Progress) -> bool:
        """Return whether the patience is exhausted or the limit is reached."""
        return self._count >= self.patience or self._max_trigger.stays_fired(progress)

    def _check(self, *, observed: bool) -> bool:
        """Compare the mean since the last check with the best, and return whether the patience is exhausted."""
        if not observed:
            warnings.warn(
                f"{self.monitor!r} was not observed at this check for early stopping, which is skipped.",
                stacklevel=3,
            )
            return False
        mean = self._average.compute()
        self._average.reset()
        if self._improves(mean):
            self._best, self._count = mean, 0
        else:
            self._count += 1
        return self._count >= self.patience

    def _improves(self, mean: float) -> bool:
        """Return whether a mean is strictly better than the best so far."""
        # Compared with an infinity at first, so that a first mean of NaN is no improvement either.
        if self.mode == "max":
            return mean > (float("-inf") if self._best is None else self._best)
        return mean < (float("inf") if self._best is None else self._best)
