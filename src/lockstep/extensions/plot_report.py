"""Plot the log as curves."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from lockstep.extensions.log_report import COUNTER_KEYS, LogEntry, find_log
from lockstep.extensions.notebook import InlineImage, in_notebook
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.side_files import SideFile
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIME_FRACTION = 0.05
"""The largest fraction of a run's time that is spent on plotting."""


class Plot(Extension):
    """The base class of extensions that draw an image in the trainer's folder, and in a notebook also below the cell.

    Args:
        filename: The file name, relative to the trainer's folder; its extension determines the format.
        trigger: The trigger that decides when to plot.

    Raises:
        ImportError: If matplotlib is not installed.
    """

    def __init__(self, filename: str, trigger: TriggerSpec) -> None:
        check_matplotlib(type(self).__name__)
        self.filename = filename
        self.trigger = trigger
        self._next = 0.0
        self._inline: InlineImage | None = None

    @abstractmethod
    def plot(self, trainer: Trainer) -> Figure | None:
        """Return the figure; None if there is nothing to show.

        Args:
            trainer: The trainer, between two updates.
        """

    def initialize(self, trainer: Trainer) -> None:
        """Check the file, if it exists, and prepare one image for each run, below the cell that runs it."""
        SideFile(trainer.out, self.filename).check()
        self._inline = InlineImage() if in_notebook() else None

    def __call__(self, trainer: Trainer) -> None:
        """Draw the image, unless the last one is too recent."""
        if time.perf_counter() >= self._next:
            self.finalize(trainer)

    def finalize(self, trainer: Trainer) -> None:
        """Draw the image, and compute from the time taken when the next one may be drawn."""
        if not trainer.is_main:
            return
        start = time.perf_counter()
        figure = self.plot(trainer)
        if figure is not None:
            save_figure(figure, SideFile(trainer.out, self.filename))
            if self._inline is not None:
                image = BytesIO()
                figure.savefig(image, format="png")
                self._inline.show(image.getvalue())
        end = time.perf_counter()
        self._next = end + (end - start) / MAX_TIME_FRACTION


class PlotReport(Plot):
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
        super().__init__(filename, trigger)
        self.keys = check_names("keys", keys)
        self._unobserved = Unobserved("`keys` of PlotReport", self.keys)
        self.title = title
        self.log_report = log_report

    def initialize(self, trainer: Trainer) -> None:
        """Check that there is a log."""
        find_log(trainer, self.log_report, reader=self)
        super().initialize(trainer)

    def plot(self, trainer: Trainer) -> Figure | None:
        """Return the curves of the log; None if it has no value of the names."""
        log = find_log(trainer, self.log_report, reader=self).log
        self._unobserved.check(trainer, {name for entry in log for name in entry}, at_end=True)
        panels = _panels(log, self.keys)
        return draw(log, panels, title=self.title or trainer.out.resolve().name) if panels else None


def draw(log: Sequence[LogEntry], panels: dict[str, list[str]], *, title: str) -> Figure:
    """Plot a log, with the panels side by side.

    Args:
        log: The entries of the log.
        panels: The names of the curves of each panel, by the name of the panel.
        title: The title of the figure.
    """
    figure, columns = panel_grid(1, len(panels), height=4.2)
    figure.suptitle(title)
    for (axes,), (name, keys) in zip(columns, panels.items(), strict=True):
        for key in keys:
            _curve(axes, log, key)
        if log[-1]["epoch_detail"] >= 4:  # noqa: PLR2004 - enough whole epochs to mark
            axes.locator_params(axis="x", integer=True)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.legend()
    return figure


def panel_grid(rows: int, columns: int, *, height: float) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """Return a figure with a grid of panels, and the panels of each column.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        height: The height of the figure in inches.
    """
    # Imported here, because it takes a second and only plots need it. The figure is created without pyplot, whose
    # state would be shared with your own figures.
    from matplotlib.figure import Figure  # noqa: PLC0415 - lazy, see above

    figure = Figure(figsize=(5.5 * columns, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    return figure, panels.T


def save_figure(figure: Figure, file: SideFile) -> None:
    """Write a figure to a file, which is replaced in one step, because you may be viewing the image.

    Args:
        figure: The figure.
        file: The file; its extension determines the format.
    """
    image = BytesIO()
    figure.savefig(image, format=file.path.suffix.removeprefix(".") or "png", dpi=110)
    file.replace(image.getvalue())


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
        *(zip(*points, strict=True) if points else ([], [])),
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
