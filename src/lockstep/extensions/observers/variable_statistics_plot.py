"""Plot statistics of all parameters and gradients over a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.extensions.plot_report import Plot, panel_grid
from lockstep.integers import check_integer
from lockstep.state import check_keys
from lockstep.trainer import WRITER, Trainer
from lockstep.triggers import TriggerSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES: Final = (0.0, 0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87, 100.0)
"""The minimum, the median, the maximum, and those of a normal distribution at 1, 2 and 3 standard deviations."""


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

    def __init__(
        self,
        parameters: Collection[str] | None = None,
        *,
        data: bool = True,
        grads: bool = True,
        percentiles: Sequence[float] = PERCENTILES,
        filename: str = "statistics.png",
        max_points: int = 1000,
        trigger: TriggerSpec = (1, "epoch"),
    ) -> None:
        super().__init__(filename, trigger)
        check_integer("max_points", max_points, minimum=2)
        for each in percentiles:
            if not 0 <= each <= 100:  # noqa: PLR2004 - per cent
                raise ValueError(f"`percentiles` must lie in 0..100, got {each}.")
        self.parameters = None if parameters is None else frozenset(parameters)
        self.kinds = [kind for kind, wanted in (("data", data), ("grad", grads)) if wanted]
        self.percentiles = tuple(percentiles)
        self.max_points = max_points
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
            tensors = {
                "data": [each.detach() for each in chosen],
                "grad": [e.grad for e in chosen if e.grad is not None],
            }
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
