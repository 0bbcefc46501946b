"""Find a learning rate by a run in which it grows exponentially."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.arguments import check_choice, check_instance, check_integer, check_number, look_up
from lockstep.elsewhere import check_installed
from lockstep.tuning.restored import restored
from lockstep.updaters import ParallelUpdater

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 0.98
"""The weight of the previous losses in the smoothed loss."""


@dataclass(frozen=True, slots=True)
class LRFinderResult:
    """The losses of a run in which the learning rate grew.

    Attributes:
        lrs: The learning rate of each update.
        losses: The loss of each update, before its step.
        smoothed: The exponential moving average of the losses, corrected for its start.
        diverged: Whether the run ended early because the loss had become too large or was not finite.
        skip_begin: The number of first updates that are not considered, because the average of few losses is noisy.
        skip_end: The number of last updates that are not considered, because the loss may have begun to grow.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool
    skip_begin: int = 10
    skip_end: int = 1

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the smoothed loss falls fastest, over the logarithm of the rate.

        It is None if there are fewer than three updates to consider, or if the loss falls nowhere.
        """
        end = len(self.lrs) - self.skip_end
        slopes = {
            (self.smoothed[index + 1] - self.smoothed[index - 1])
            / (math.log(self.lrs[index + 1]) - math.log(self.lrs[index - 1])): index
            for index in range(end - 2, self.skip_begin, -1)
        }
        steepest = min((slope for slope in slopes if math.isfinite(slope)), default=0.0)
        return self.lrs[slopes[steepest]] if steepest < 0 else None

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot the losses over the learning rate, with the suggestion.

        Args:
            path: The file to write, whose extension determines the format; or None for no file.

        Returns:
            The figure of matplotlib, which a notebook displays if it is the last value of a cell.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        check_installed("matplotlib", extra="plot", user="`plot`")
        # The figure is created without pyplot, whose state would be shared with your own figures.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - takes a second
        from matplotlib.figure import Figure  # noqa: PLC0415 - as above

        figure = Figure(figsize=(6.0, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        axes.plot(self.lrs, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            index = self.lrs.index(self.suggestion)
            axes.plot([self.suggestion], [self.smoothed[index]], "o", label=f"suggestion {self.suggestion:.3g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=110)
        return figure


def find_lr(
    updater: ParallelUpdater,
    *,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_updates: int = 100,
    mode: Literal["exponential", "linear"] = "exponential",
    stop_factor: float | None = 4.0,
    optimizer: str = "main",
    loss: str = "loss",
) -> LRFinderResult:
    """Train for some updates with a growing learning rate, restore the run, and suggest a rate.

    The updater is as it was before: models, optimizers, schedulers, the position in the data, counters and gradients,
    and the states of the default random generators of torch's CPU, of Python and of NumPy. Only a run that has not
    begun, or is between two updates, can be passed; nothing is logged, and no extension is called.

    Args:
        updater: The updater. Its schedulers have no effect during the search.
        min_lr: The first learning rate, above 0.
        max_lr: The last learning rate, above `min_lr`.
        num_updates: The number of updates, at least 3.
        mode: Whether the rate grows by a constant factor (``"exponential"``) or by a constant difference.
        stop_factor: The search ends when the smoothed loss is more than this factor, above 1, times the smallest one;
            None to go on. It also ends at a loss that is not finite.
        optimizer: The name of the optimizer. The rate is that of its first group of parameters; the rates of other
            groups keep their ratio to it.
        loss: The name of the observed loss, such as ``"gen/loss"`` for a step function with several optimizers.

    Returns:
        The losses, and the suggestion. Nothing is set: pass the suggestion to the optimizer that you create.

    Raises:
        KeyError: If there is no optimizer or no observed value of this name.
        TypeError: If `updater` is not a `ParallelUpdater`.
        ValueError: If a number is out of range.

    Determinism: The losses, and so the suggestion, are equal on all placements.

    References: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, arXiv:1506.01186, section 3.3.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> from lockstep import BatchIterator, supervised
        >>> loss_fn = supervised(torch.nn.functional.mse_loss)
        >>> updater = ParallelUpdater(BatchIterator(data, 8), sgd, model, devices=1, loss_fn=loss_fn)
        >>> result = find_lr(updater, num_updates=20)
        >>> len(result.lrs), updater.iteration
        (20, 0)
    """
    _check(updater, min_lr, max_lr, num_updates, stop_factor)
    check_choice("mode", mode, ("exponential", "linear"))
    groups = look_up(optimizer, updater.get_all_optimizers(), "optimizer").param_groups
    first = groups[0]["lr"]
    ratios = [group["lr"] / first if first else 1.0 for group in groups]
    lrs, losses, smoothed = [], [], []
    average, best, diverged = 0.0, math.inf, False
    with restored(updater):
        for index in range(num_updates):
            share = index / (num_updates - 1)
            exponential = min_lr * (max_lr / min_lr) ** share
            lr = exponential if mode == "exponential" else min_lr + (max_lr - min_lr) * share
            # Read again in each update: loading a state replaces the groups of some optimizers.
            for group, ratio in zip(updater.get_optimizer(optimizer).param_groups, ratios, strict=True):
                group["lr"] = lr * ratio
            observed = updater.update().observation()
            if loss not in observed:
                raise KeyError(f"`loss` must be one of {', '.join(observed)}, got {loss!r}.")
            value = float(observed[loss])
            average = SMOOTHING * average + (1 - SMOOTHING) * value
            lrs.append(lr)
            losses.append(value)
            smoothed.append(average / (1 - SMOOTHING ** (index + 1)))
            diverged = not math.isfinite(value) or (stop_factor is not None and smoothed[-1] > stop_factor * best)
            if diverged:
                break
            best = min(best, smoothed[-1])
    return LRFinderResult(tuple(lrs), tuple(losses), tuple(smoothed), diverged)


def _check(updater: ParallelUpdater, min_lr: float, max_lr: float, num_updates: int, stop_factor: float | None) -> None:
    """Check the arguments of `find_lr`."""
    check_instance("updater", updater, ParallelUpdater, "a ParallelUpdater")
    check_number("min_lr", min_lr, above=0, finite=True)
    check_number("max_lr", max_lr)
    if not min_lr < max_lr < math.inf:
        raise ValueError(f"`max_lr` must be above `min_lr` ({min_lr}), got {max_lr}.")
    check_integer("num_updates", num_updates, minimum=3)
    if stop_factor is not None:
        check_number("stop_factor", stop_factor, above=1)
