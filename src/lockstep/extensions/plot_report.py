"""Plot the log as curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from lockstep.extensions.log_report import COUNTER_KEYS, LogEntry, find_log
from lockstep.extensions.notebook import InlineImage, in_notebook
from lockstep.side_files import SideFile
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIME_FRACTION = 0.05
"""The largest fraction of a run's time that is spent on plotting."""


class PlotReport(Extension):
    """Plots the entries of a `LogReport` over epochs, as an image in the trainer's folder.

    Names with the same last part share their axes: ``main/loss`` and ``validation/main/loss`` are two curves of
    one panel, ``loss``. The image is replaced in one step. In a notebook, it is also displayed below the cell. When
    the trigger fires, no plot is made if plotting would take more than a twentieth of the run's time; the complete
    curve is plotted when the run ends. With several processes, rank 0 plots.

    Args:
        keys: The names to plot; by default all names in the log, except ``main/skipped`` if no update was skipped.
        filename: The file name, relative to the trainer's folder; its extension determines the format.
        trigger: The trigger that decides when to plot.
        title: The title; by default the name of the trainer's folder.
        log_report: The name of the `LogReport`.

    Raises:
        ImportError: If matplotlib is not installed.
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
        check_matplotlib("PlotReport")
        self.keys = None if keys is None else tuple(keys)
        self.filename = filename
        self.trigger = trigger
        self.title = title
        self.log_report = log_report
        self._next = 0.0
        self._inline: InlineImage | None = None

    def initialize(self, trainer: Trainer) -> None:
        """Check that there is a log, and the file, if it exists."""
        find_log(trainer, self.log_report, reader=self)
        SideFile(trainer.out, self.filename).check()
        # One image for each run, below the cell that runs it.
        self._inline = InlineImage() if in_notebook() else None

    def __call__(self, trainer: Trainer) -> None:
        """Plot the log, unless the last plot is too recent."""
        if trainer.is_main and time.perf_counter() >= self._next:
            self._draw(trainer)

    def finalize(self, trainer: Trainer) -> None:
        """Plot the complete log."""
        if trainer.is_main:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        """Plot the log, and compute from the time taken when the next plot may be made."""
        start = time.perf_counter()
        log = find_log(trainer, self.log_report, reader=self).log
        panels = _panels(log, self.keys)
        if panels:
            file = SideFile(trainer.out, self.filename)
            png = draw(log, panels, file, title=self.title or trainer.out.resolve().name)
            if self._inline is not None:
                self._inline.show(png())
        end = time.perf_counter()
        self._next = end + (end - start) / MAX_TIME_FRACTION


def draw(log: Sequence[LogEntry], panels: dict[str, list[str]], file: SideFile, *, title: str) -> Callable[[], bytes]:
    """Plot a log to a file, with the panels side by side.

    Args:
        log: The entries of the log.
        panels: The names of the curves of each panel, by the name of the panel.
        file: The file, which is replaced in one step.
        title: The title of the figure.

    Returns:
        A function that returns the plot as an image in the format PNG.
    """
    # Imported here, because it takes a second and only plots need it. The figure is created without pyplot, whose
    # state would be shared with your own figures.
    from matplotlib.figure import Figure  # noqa: PLC0415 - lazy, see above

    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
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
    return save_figure(figure, file)


def save_figure(figure: Figure, file: SideFile) -> Callable[[], bytes]:
    """Write a figure to a file, which is replaced in one step, because you may be viewing the image.

    Args:
        figure: The figure.
        file: The file; its extension determines the format.

    Returns:
        A function that returns the figure as an image in the format PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - takes a second

    canvas = FigureCanvasAgg(figure)

    def image(suffix: str, dpi: int | None = None) -> bytes:
        written = BytesIO()
        canvas.print_figure(written, format=suffix.removeprefix(".") or "png", dpi=dpi)
        return written.getvalue()

    file.replace(image(file.path.suffix, dpi=110))
    return partial(image, "png")


def _panels(log: Sequence[LogEntry], keys: Sequence[str] | None) -> dict[str, list[str]]:
    """Group the names in the log by their last part; by default without counts of skipped updates if none was."""
    logged = dict.fromkeys(name for entry in log for name in entry if name not in COUNTER_KEYS)
    if keys is None:
        keys = [key for key in logged if not key.endswith("/skipped") or any(entry.get(key) for entry in log)]
    panels: dict[str, list[str]] = {}
    for key in [key for key in keys if key in logged]:
        panels.setdefault(key.rpartition("/")[2], []).append(key)
    return panels


def _curve(axes: Axes, log: Sequence[LogEntry], key: str) -> None:
    """Plot the finite values of one name."""
    points = [(entry["epoch_detail"], entry[key]) for entry in log if key in entry and math.isfinite(entry[key])]
    axes.plot(
        [epoch for epoch, _ in points],
        [value for _, value in points],
        label=_label(key),
        marker="o" if len(points) <= 30 else "",  # noqa: PLR2004 - more markers would overlap
        markersize=3.5,
        linewidth=1.5,
    )


def _label(key: str) -> str:
    """Return the part of a name that distinguishes the curves of one panel."""
    source = key.rpartition("/")[0]
    return "training" if source == "main" else source.removesuffix("/main") or key


def check_matplotlib(user: str) -> None:
    """Check that matplotlib is installed.

    Args:
        user: The name of the class that requires it.

    Raises:
        ImportError: If it is not.
    """
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - lazy, and only to check that it is installed
    except ImportError as error:
        raise ImportError(f"{user} requires matplotlib. Install it: pip install 'lockstep-torch[plot]'.") from error
