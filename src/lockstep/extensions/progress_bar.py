"""Display the progress of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from lockstep.extensions.plots import in_notebook
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.metrics import Observed, as_mean
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import Unit, position

FORMAT_WITH_BOUND = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
FORMAT_WITHOUT_BOUND = "{desc} [{elapsed}]"
LINE_WITH_BOUND = "{percentage:.0f}% {desc} [{elapsed}<{remaining}]"
"""The format of a line in a file. The line of a run without a bound is that of the bar."""

REDRAW_INTERVAL = 0.1
"""The smallest number of seconds between two drawings of a bar."""


class ProgressBar(Extension):
    """Displays the progress of the whole run: the epoch, the iteration, the loss, and the updates per second.

    On a terminal it is a bar, and in a notebook a widget (`tqdm.auto`), which is redrawn at most ten times per second.
    Elsewhere, such as in the log of a job, it is a line of text from time to time, and one at the end. The length of
    the bar is the bound of the trainer, or the limit of a trigger such as `EarlyStopping`, see `Trigger.limit`; a run
    that may end at any time has a line without a bar. With several processes,
    rank 0 draws.

    Values are read only when they are drawn, so that the host rarely waits for a device.

    Args:
        show: Whether to draw a bar, also into a file, where each drawing adds a line, or nothing at all. None chooses
            by the place, as above.
        out: The stream to draw to; by default the current standard error.
        values: The names of the observed values to show, such as ``"validation/main/accuracy"``, each with the last
            value observed. By default the losses of the update.
        line_interval: The number of seconds, at least 0, between two lines of text.

    Raises:
        ValueError: If `line_interval` is less than 0.
    """

    priority = READER - 2

    def __init__(
        self,
        *,
        show: bool | None = None,
        out: TextIO | None = None,
        values: Sequence[str] | None = None,
        line_interval: float = 30.0,
    ) -> None:
        if not line_interval >= 0:
            raise ValueError(f"`line_interval` must be at least 0, got {line_interval}.")
        self.show = show
        self.out = out
        self.values = check_names("values", values)
        self._unobserved = Unobserved("`values` of ProgressBar", self.values)
        self.line_interval = line_interval
        self._display: _Bar | _Lines | None = None
        self._unit: Unit = "iteration"
        self._start = (0, 0.0)
        self._next = 0.0
        self._seen: dict[str, Observed] = {}

    def initialize(self, trainer: Trainer) -> None:
        """Create the display at the current position of the run."""
        out = self.out or sys.stderr
        limit = trainer.until.limit
        total, self._unit = limit or (None, "iteration")
        # The speed is that since the run started or resumed, and not that of an earlier process.
        self._start = (trainer.updater.iteration, time.perf_counter())
        self._seen = {}
        self._next = 0.0
        if self.show is False or not trainer.is_main:
            return
        initial = 0.0 if total is None else min(position(trainer, self._unit), total)
        widget = self.out is None and in_notebook()
        if self.show or widget or out.isatty():
            self._display = _Bar(total, initial, out, self._text(trainer, 0.0), widget=widget)
        else:
            self._display = _Lines(total, initial, out)
            self._next = time.perf_counter() + self.line_interval

    def __call__(self, trainer: Trainer) -> None:
        """Draw again, unless the last drawing is too recent."""
        if trainer.updater.is_new_epoch:
            self._unobserved.check(trainer, trainer.observation)
        if self._display is None:
            return
        for name in self.values or ():
            if name in trainer.observation:
                self._seen[name] = trainer.observation[name]
        now = time.perf_counter()
        if now >= self._next:
            self._draw(self._display, trainer)
            self._next = now + (REDRAW_INTERVAL if isinstance(self._display, _Bar) else self.line_interval)

    def finalize(self, trainer: Trainer) -> None:
        """Draw the last position, and end the display."""
        self._unobserved.check(trainer, trainer.observation, at_end=True)
        display, self._display = self._display, None
        if display is not None:
            self._draw(display, trainer)
            display.close()

    def _draw(self, display: _Bar | _Lines, trainer: Trainer) -> None:
        """Show the position and the text."""
        iteration, start = self._start
        speed = (trainer.updater.iteration - iteration) / max(time.perf_counter() - start, 1e-9)
        display.draw(position(trainer, self._unit), self._text(trainer, speed))

    def _text(self, trainer: Trainer, speed: float) -> str:
        """Return the text next to the bar."""
        updater, values = trainer.updater, self._seen
        if self.values is None:
            values = {name: value for name, value in trainer.observation.items() if _is_loss(name)}
        shown = "".join(f"{name} {float(as_mean(value)):.4g}, " for name, value in values.items())
        return f"epoch {updater.epoch_detail:.2f}, iteration {updater.iteration}, {shown}{speed:.1f} updates/s"


def _is_loss(name: str) -> bool:
    return name.startswith("main/") and name.endswith("/loss")


class _Bar:
    """A bar of tqdm: text on a terminal, or a widget in a notebook.

    Args:
        total: The bound, or None.
        initial: The position at the start.
        out: The stream to draw to.
        text: The text next to the bar.
        widget: Whether to draw a widget.
    """

    def __init__(self, total: float | None, initial: float, out: TextIO, text: str, *, widget: bool) -> None:
        kind = _widget_class() if widget else tqdm
        # Without the monitor thread of tqdm, which would outlive the run.
        self._bar = type("Bar", (kind,), {"monitor_interval": 0})(
            total=total,
            initial=initial,
            file=out,
            bar_format=FORMAT_WITHOUT_BOUND if total is None else FORMAT_WITH_BOUND,
            dynamic_ncols=True,
            desc=text,
        )

    def draw(self, current: float, text: str) -> None:
        """Draw the bar again.

        Args:
            current: The position.
            text: The text next to the bar.
        """
        # If an epoch is not a whole number of updates, the last update goes slightly beyond the bound.
        self._bar.n = current if self._bar.total is None else min(current, self._bar.total)
        self._bar.set_description_str(text, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _widget_class() -> type[tqdm]:
    """Return the bar for notebooks: a widget, or text with a warning if the package for widgets is not installed."""
    from tqdm.auto import tqdm as kind  # noqa: PLC0415 - imports asyncio, and looks for widgets

    return kind  # type: ignore[no-any-return]  # tqdm is untyped


class _Lines:
    """Lines of text, for files and pipes.

    Args:
        total: The bound, or None.
        initial: The position at the start.
        out: The stream to write to.
    """

    def __init__(self, total: float | None, initial: float, out: TextIO) -> None:
        self._total, self._initial, self._out = total, initial, out
        self._start = time.perf_counter()
        self._last: float | None = None

    def draw(self, current: float, text: str) -> None:
        """Write a line, which can be read at once.

        Args:
            current: The position.
            text: The text of the line.
        """
        # At the end of the run, the last position may have its line already.
        if current == self._last:
            return
        self._last = current
        line = tqdm.format_meter(
            current if self._total is None else min(current, self._total),
            self._total,
            time.perf_counter() - self._start,
            prefix=text,
            initial=self._initial,
            bar_format=FORMAT_WITHOUT_BOUND if self._total is None else LINE_WITH_BOUND,
        )
        print(line, file=self._out, flush=True)

    def close(self) -> None:
        """Close the display. Every line has been written already."""
