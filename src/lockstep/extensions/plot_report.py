"""Draw the log as curves."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.extensions.log_report import COUNTERS, LogEntry, find_log
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARE = 0.05
"""How much of a run's time may go into drawing."""


class PlotReport(Extension):
    """Draws the entries of a `LogReport` over epochs, as a picture in the trainer's folder.

    Names that end alike share their axes: ``main/loss`` and ``validation/main/loss`` are two curves of
    one panel, ``loss``. The picture is replaced in one piece. A firing is left out where drawing would
    take more than a twentieth of the run's time; the whole curve is drawn when the run ends. Of several
    processes, rank 0 draws.

    Args:
        keys: The names to draw; all that the log has unless given.
        filename: The file, below the trainer's folder; its ending names the format.
        trigger: When to draw.
        title: The heading; the name of the trainer's folder unless given.
        log_report: The name of the `LogReport`.

    Raises:
        ImportError: matplotlib is missing.
    """

    priority = READER - 1

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        filename: str = "curve.png",
        *,
        trigger: TriggerSpec = (1, "epoch"),
        title: str | None = None,
        log_report: str = "LogReport",
    ) -> None:
        _check_matplotlib()
        self.keys = None if keys is None else tuple(keys)
        self.filename = filename
        self.trigger = trigger
        self.title = title
        self.log_report = log_report
        self._next = 0.0

    def initialize(self, trainer: Trainer) -> None:
        """Check that there is a log."""
        find_log(trainer, self.log_report, reader=self)

    def __call__(self, trainer: Trainer) -> None:
        """Draw, unless the last drawing was just before."""
        if trainer.is_main and time.perf_counter() >= self._next:
            self._draw(trainer)

    def finalize(self, trainer: Trainer) -> None:
        """Draw the whole curve."""
        if trainer.is_main:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        began = time.perf_counter()
        log = find_log(trainer, self.log_report, reader=self).log
        panels = _panels(log, self.keys)
        if panels:
            path = trainer.out / self.filename
            draw(log, panels, path, title=self.title or trainer.out.resolve().name)
        ended = time.perf_counter()
        self._next = ended + (ended - began) / SHARE


def draw(log: Sequence[LogEntry], panels: dict[str, list[str]], path: Path, *, title: str) -> None:
    """Draw a log into a file, one panel beside the other.

    Args:
        log: The entries.
        panels: The names of the curves of each panel, by the panel's own name.
        path: The file, replaced in one piece.
        title: The heading.
    """
    # Imported here: it takes a second, and is needed by those who plot only. The figure is made
    # without pyplot, whose state would be shared with the caller's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - lazy, see above
    from matplotlib.figure import Figure  # noqa: PLC0415 - lazy, see above

    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (name, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for key in keys:
            _curve(axes, log, key)
        if log[-1]["epoch_detail"] >= 4:  # noqa: PLR2004 - enough whole epochs to mark
            axes.locator_params(axis="x", integer=True)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend()
    new = path.with_name(f"{path.name}.new")
    canvas.print_figure(new, format=path.suffix.removeprefix(".") or "png", dpi=110)
    new.replace(path)


def _panels(log: Sequence[LogEntry], keys: Sequence[str] | None) -> dict[str, list[str]]:
    """Group the names in the log by their last part."""
    there = dict.fromkeys(name for entry in log for name in entry if name not in COUNTERS)
    panels: dict[str, list[str]] = {}
    for key in there if keys is None else [key for key in keys if key in there]:
        panels.setdefault(key.rpartition("/")[2], []).append(key)
    return panels


def _curve(axes: Axes, log: Sequence[LogEntry], key: str) -> None:
    points = [(entry["epoch_detail"], entry[key]) for entry in log if key in entry and math.isfinite(entry[key])]
    axes.plot(
        [epoch for epoch, _ in points],
        [value for _, value in points],
        label=_label(key),
        marker="o" if len(points) <= 30 else "",  # noqa: PLR2004 - beyond, dots run into a band
        markersize=3.5,
        linewidth=1.5,
    )


def _label(key: str) -> str:
    """Return the part of a name that tells the curves of one panel apart."""
    source = key.rpartition("/")[0]
    return "training" if source == "main" else source.removesuffix("/main") or key


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - lazy, and only to see whether it is there
    except ImportError as error:
        raise ImportError("PlotReport must find matplotlib. Install it: pip install 'lockstep-torch[plot]'.") from error
