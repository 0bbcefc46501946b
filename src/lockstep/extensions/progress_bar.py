"""Show how far a run has come."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import Unit, Until, position

BOUNDED = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
UNBOUNDED = "{desc} [{elapsed}]"


class ProgressBar(Extension):
    """Shows a bar of the whole run with the epoch, the iteration and updates per second.

    The bar is as long as the trainer's bound; for a run that a trigger ends there is a line
    without a bar. It is drawn at most ten times a second, and closed whenever the run ends. Of several
    processes, rank 0 draws it.

    Args:
        show: True draws it always, False never, None only on a terminal: in a file every redrawing
            would be one more line.
        out: Where to; the standard error of the moment unless given.
    """

    priority = READER - 2

    def __init__(self, *, show: bool | None = None, out: TextIO | None = None) -> None:
        self.show = show
        self.out = out
        self._bar: _Bar | None = None
        self._unit: Unit = "iteration"
        self._began_at = (0, 0.0)

    def initialize(self, trainer: Trainer) -> None:
        """Open the bar where the run stands."""
        until = trainer.until if isinstance(trainer.until, Until) else None
        self._unit = until.unit if until else "iteration"
        self._began_at = (trainer.updater.iteration, time.perf_counter())
        self._bar = _Bar(
            total=until.bound if until else None,
            initial=min(position(trainer, self._unit), until.bound) if until else 0,
            file=self.out or sys.stderr,
            disable=True if not trainer.is_main else None if self.show is None else not self.show,
            bar_format=BOUNDED if until else UNBOUNDED,
            mininterval=0.1,
            miniters=0,
            dynamic_ncols=True,
            desc=_text(trainer, 0.0),
        )

    def __call__(self, trainer: Trainer) -> None:
        """Draw the bar, if it was not drawn just before."""
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
        iteration, began = self._began_at
        speed = (trainer.updater.iteration - iteration) / max(time.perf_counter() - began, 1e-9)
        # The last update of an uneven epoch leads a little beyond the bound.
        place = position(trainer, self._unit)
        bar.n = place if bar.total is None else min(place, bar.total)
        bar.desc = _text(trainer, speed)


class _Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
    """A bar without the thread that would redraw a silent one: a run leaves no thread behind."""

    monitor_interval = 0


def _text(trainer: Trainer, speed: float) -> str:
    updater = trainer.updater
    return f"epoch {updater.epoch_detail:.2f}, iteration {updater.iteration}, {speed:.1f} updates/s"
