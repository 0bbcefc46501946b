"""Plots of a run: the curves of its log, and statistics of the parameters."""

from __future__ import annotations

import math
import sys
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.arguments import check_integer
from lockstep.elsewhere import check_installed
from lockstep.extensions.log_report import COUNTER_KEYS, LogEntry, find_log
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.side_files import SideFile
from lockstep.state import check_keys
from lockstep.trainer import READER, WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # IPython is in use only if it has been imported.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


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

    filename: str

    def __post_init__(self) -> None:
        check_installed("matplotlib", extra="plot", user=type(self).__name__)
        self._next = 0.0
        self._image, self._is_shown = "", False

    @abstractmethod
    def plot(self, trainer: Trainer) -> Figure | None:
        """Return the figure; None if there is nothing to show.

        Args:
            trainer: The trainer, between two updates.
        """

    def initialize(self, trainer: Trainer) -> None:
        """Check the file, if it exists, and prepare one image for each run, below the cell that runs it."""
        SideFile(trainer.out, self.filename).check()
        self._image, self._is_shown = f"lockstep-{id(self)}-{time.time_ns()}" if in_notebook() else "", False

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
            if self._image:
                self._show(figure)
        end = time.perf_counter()
        self._next = end + (end - start) / MAX_TIME_FRACTION

    def _show(self, figure: Figure) -> None:
        """Show the figure below the cell, instead of the one before."""
        from IPython.display import Image, display  # noqa: PLC0415 - present where `in_notebook` returns True

        image = BytesIO()
        figure.savefig(image, format="png")
        display(Image(image.getvalue()), display_id=self._image, update=self._is_shown)
        self._is_shown = True


@dataclass(eq=False, repr=False)
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

    keys: Sequence[str] | None = None
    filename: str = "curve.png"
    _: KW_ONLY
    trigger: TriggerSpec = (1, "epoch")
    title: str | None = None
    log_report: str = "LogReport"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys = check_names("keys", self.keys)
        self._unobserved = Unobserved("`keys` of PlotReport", self.keys)

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


PERCENTILES: Final = (0.0, 0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87, 100.0)
"""The minimum, the median, the maximum, and those of a normal distribution at 1, 2 and 3 standard deviations."""


@dataclass(eq=False, repr=False)
class VariableStatisticsPlot(Plot):
    """Plots the mean, the standard deviation and percentiles of all elements of the parameters, and of the gradients.

    The image is in the trainer's folder, and in a notebook also below the cell. It is replaced in one step, and not
    made if plotting would take more than a twentieth of the run's time; the last one is made when the run ends. If
    there are more points than `max_points`, every second one is dropped and from then on only every second call adds
    one. With several processes, rank 0 plots.

    Args:
        parameters: The names of the parameters, such as ``"0.weight"``, with the name of the model before them unless
            it is the only one; None for all.
        data: Whether to plot the parameters.
        grads: Whether to plot the gradients, where there are any.
        percentiles: The percentiles, in 0..100.
        filename: The file name, relative to the trainer's folder; its extension determines the format.
        max_points: The largest number of points of a curve, at least 2.
        trigger: The trigger that decides when the statistics are computed, which sorts all elements on their device.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If a percentile or `max_points` is out of range.

    Determinism: the statistics have the same bits on all placements of the same kind of device, and after a resume.

    References: Chainer 7.8.1, ``VariableStatisticsPlot``, for the figure.
    """

    priority = WRITER

    parameters: Collection[str] | None = None
    _: KW_ONLY
    data: bool = True
    grads: bool = True
    percentiles: Sequence[float] = PERCENTILES
    filename: str = "statistics.png"
    max_points: int = 1000
    trigger: TriggerSpec = (1, "epoch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("max_points", self.max_points, minimum=2)
        for each in self.percentiles:
            if not 0 <= each <= 100:  # noqa: PLR2004 - per cent
                raise ValueError(f"`percentiles` must lie in 0..100, got {each}.")
        self.parameters = None if self.parameters is None else frozenset(self.parameters)
        self.kinds = [kind for kind, wanted in (("data", self.data), ("grad", self.grads)) if wanted]
        self.percentiles = tuple(self.percentiles)
        self.points: list[tuple[int, dict[str, list[float]]]] = []
        """The update of each point, and for ``"data"`` and ``"grad"`` the mean, the deviation and the percentiles."""
        self._num_calls = 0
        self._stride = 1

    def initialize(self, trainer: Trainer) -> None:
        """Check the names of the parameters.

        Raises:
            ValueError: If there is no parameter of a name.
        """
        unknown = sorted((self.parameters or frozenset()) - _named(trainer).keys())
        if unknown:
            raise ValueError(f"`parameters` must name some of {', '.join(_named(trainer))}, got {unknown[0]!r}.")
        super().initialize(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Compute the statistics, and plot them unless the last plot is too recent."""
        if self._num_calls % self._stride == 0:
            chosen = [
                each for name, each in _named(trainer).items() if self.parameters is None or name in self.parameters
            ]
            grads = [each.grad for each in chosen if each.grad is not None]
            tensors = {"data": [each.detach() for each in chosen], "grad": grads}
            found = {kind: _statistics(tensors[kind], self.percentiles) for kind in self.kinds if tensors[kind]}
            self.points.append((trainer.updater.iteration, found))
        self._num_calls += 1
        if len(self.points) > self.max_points:
            self.points, self._stride = self.points[::2], 2 * self._stride
        super().__call__(trainer)

    def state_dict(self) -> dict[str, object]:
        """Return the points."""
        points = [[update, dict(found)] for update, found in self.points]
        return {"points": points, "num_calls": self._num_calls, "stride": self._stride}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: If a key is missing or unknown; nothing has changed then.
        """
        check_keys(state, ("points", "num_calls", "stride"), of="VariableStatisticsPlot")
        self.points = [(update, dict(found)) for update, found in state["points"]]
        self._num_calls, self._stride = state["num_calls"], state["stride"]

    def plot(self, trainer: Trainer) -> Figure | None:  # noqa: ARG002 - the points have all that is drawn
        """Return the curves of all points; None if there are none."""
        kinds = [kind for kind in self.kinds if any(kind in found for _, found in self.points)]
        if not kinds:
            return None
        figure, columns = panel_grid(2, len(kinds), height=6.5)
        for (upper, lower), kind in zip(columns, kinds, strict=True):
            updates = [update for update, found in self.points if kind in found]
            means, deviations, *rows = zip(*[found[kind] for _, found in self.points if kind in found], strict=True)
            upper.set_title("parameters" if kind == "data" else "gradients")
            upper.errorbar(updates, means, yerr=deviations, marker=".", label="mean ± standard deviation")
            for percentile, row in zip(self.percentiles, rows, strict=True):
                lower.plot(updates, row, marker=".", label=f"{percentile:g} %")
            for axes in (upper, lower):
                axes.set_xlabel("update")
                axes.legend(fontsize="x-small")
        return figure


def _named(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Return all parameters by name."""
    models = trainer.updater.get_all_models()
    return {
        f"{model}.{name}" if len(models) > 1 else name: parameter
        for model, network in models.items()
        for name, parameter in network.named_parameters()
    }


def _statistics(tensors: Sequence[torch.Tensor], percentiles: Sequence[float]) -> list[float]:
    """Return the mean, the standard deviation and percentiles of all elements, interpolated between neighbors.

    >>> _statistics([torch.tensor([1.0, 4.0]), torch.tensor([2.0])], [0, 50, 75, 100])[2:]
    [1.0, 2.0, 3.0, 4.0]
    """
    device = tensors[0].device
    elements = torch.cat([each.to(device).flatten().double() for each in tensors]).sort().values
    places = torch.tensor(percentiles, dtype=torch.float64, device=device) / 100 * (len(elements) - 1)
    lower = elements[places.floor().long()]
    between = lower + (elements[places.ceil().long()] - lower) * places.frac()
    found: list[float] = torch.cat([torch.stack([elements.mean(), elements.std(correction=0)]), between]).tolist()
    return found
