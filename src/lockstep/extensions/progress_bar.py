"""Display the progress of a run."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import Unit, Until, position

FORMAT_WITH_BOUND = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
FORMAT_WITHOUT_BOUND = "{desc} [{elapsed}]"


class ProgressBar(Extension):
    """Displays a progress bar for the whole run, with the epoch, the iteration and the updates per second.

    The length of the bar is the bound of the trainer; a run that ends by a trigger has a line without a bar. It is
    redrawn at most ten times per second, and closed when the run ends. With several processes, rank 0 draws it.

    Args:
        show: Whether to draw the bar. None draws it only on a terminal, because in a file each redrawing would
            add a line.
        out: The stream to draw to; by default the current standard error.
    """

    priority = READER - 2

    def __init__(self, *, show: bool | None = None, out: TextIO | None = None) -> None:
        self.show = show
        self.out = out
        self._bar: _Bar | None = None
        self._unit: Unit = "iteration"
        self._start = (0, 0.0)

    def initialize(self, trainer: Trainer) -> None:
        """Create the bar at the current position of the run."""
        until = trainer.until if isinstance(trainer.until, Until) else None
        self._unit = until.unit if until else "iteration"
        # The speed is that since the run started or resumed, and not that of an earlier process.
        self._start = (trainer.updater.iteration, time.perf_counter())
        self._bar = _Bar(
            total=until.bound if until else None,
            initial=min(position(trainer, self._unit), until.bound) if until else 0,
            file=self.out or sys.stderr,
            disable=True if not trainer.is_main else None if self.show is None else not self.show,
            bar_format=FORMAT_WITH_BOUND if until else FORMAT_WITHOUT_BOUND,
            mininterval=0.1,
            miniters=0,
            dynamic_ncols=True,
            desc=_text(trainer, 0.0),
        )

    def __call__(self, trainer: Trainer) -> None:
        """Redraw the bar, unless the last redrawing is too recent."""
        if self._bar is not None and not self._bar.disable:
            self._show(self._bar, trainer)
            self._bar.update(0)

    def finalize(self, trainer: Trainer) -> None:
        """Draw the last position and close the bar."""
        if self._bar is not None:
            if not self._bar.disable:
                self._show(self._bar, trainer)
                self._bar.refresh()
            self._bar.close()
            self._bar = None

    def _show(self, bar: _Bar, trainer: Trainer) -> None:
        """Set the position and the text of the bar."""
        iteration, start = self._start
        speed = (trainer.updater.iteration - iteration) / max(time.perf_counter() - start, 1e-9)
        # If an epoch is not a whole number of updates, the last update goes slightly beyond the bound.
        current = position(trainer, self._unit)
        bar.n = current if bar.total is None else min(current, bar.total)
        bar.desc = _text(trainer, speed)


class _Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
    """A bar without tqdm's monitor thread, which would outlive the run."""

    monitor_interval = 0


def _text(trainer: Trainer, speed: float) -> str:
    """Return the text next to the bar."""
    updater = trainer.updater
    return f"epoch {updater.epoch_detail:.2f}, iteration {updater.iteration}, {speed:.1f} updates/s"
