"""End a run that has stopped to improve."""

from __future__ import annotations

import warnings
from typing import Literal

from lockstep.metrics import Average
from lockstep.triggers.spec import TriggerSpec, get_trigger
from lockstep.triggers.trigger import Progress, Trigger


class EarlyStopping(Trigger):
    """Fires when an observed value has not improved for several checks, or when a limit is reached.

    Each check looks at the mean since the last one, samples weighing equally. A mean strictly
    better than the best so far becomes the best and the count of checks without improvement
    starts again; otherwise, and for NaN, the count grows. It fires at a check that finds the
    count at `patience` or more.

    As in Chainer, a check needs a value that is observed right then: one that finds none warns and is left
    out, and the values before it count at the next. A run that is loaded with a later limit or with more
    patience goes on.

    Args:
        monitor: The name of the observed value, such as ``"validation/main/loss"``.
        patience: How many checks without improvement are borne, at least 1.
        mode: Whether ``"min"`` or ``"max"`` is better; ``"auto"`` takes ``"max"`` for a name with
            ``accuracy`` in it, else ``"min"``.
        check_trigger: When to check; at updates at which the value is observed.
        max_trigger: The limit; None for none.

    Raises:
        ValueError: The patience or the mode is out of range.
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
        """The best mean so far; None before the first check that had a value."""
        return self._best

    @property
    def count(self) -> int:
        """How many checks in a row brought no improvement."""
        return self._count

    def __call__(self, progress: Progress) -> bool:
        """Take the value in, check if it is time to, and say whether to stop."""
        if self.monitor in progress.observation:
            self._average.update(progress.observation[self.monitor])
        impatient = self._check_trigger(progress) and self._judge(observed=self.monitor in progress.observation)
        return self._max_trigger(progress) or impatient

    def initialize(self, progress: Progress) -> None:
        """Start the checks and the limit."""
        self._check_trigger.initialize(progress)
        self._max_trigger.initialize(progress)

    def stays_fired(self, progress: Progress) -> bool:
        """Say whether patience has run out, or the limit is reached."""
        return self._count >= self.patience or self._max_trigger.stays_fired(progress)

    def _judge(self, *, observed: bool) -> bool:
        if not observed:
            warnings.warn(
                f"{self.monitor!r} was not observed at this check for early stopping, which is left out.",
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
        if self.mode == "max":
            return mean > (float("-inf") if self._best is None else self._best)
        return mean < (float("inf") if self._best is None else self._best)
