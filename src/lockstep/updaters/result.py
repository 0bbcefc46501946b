"""The result of an update; its numbers stay on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

import torch

from lockstep.metrics import Mean, merge


@dataclass(slots=True)
class ShardReport:
    """What one shard measured.

    Attributes:
        shard: The number of the shard.
        weight: The weight of its loss: the number of samples unless the loss function returned another.
        loss: The mean loss, a detached tensor of one element.
        metrics: A pair (sum, weight) by name, for each metric that was returned or reported.
        has_own_weight: Whether the loss function returned the weight.
    """

    shard: int
    weight: float
    loss: torch.Tensor
    metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]] = field(default_factory=dict)
    has_own_weight: bool = False


@dataclass(frozen=True, slots=True)
class NonFiniteShard:
    """A shard whose gradient is not finite.

    Attributes:
        shard: The number of the shard.
        batch: The position of its batch among the batches of the update.
        samples: The samples of that batch that form the shard.
        loss: The mean loss of the shard, which may be finite nevertheless.
        parameter: The name of the first parameter whose gradient is not finite.
    """

    shard: int
    batch: int
    samples: range
    loss: float
    parameter: str


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """An update that was skipped because its gradient was not finite.

    Attributes:
        update: The number of the update, 1 for the first of the run.
        parameter: The name of the first parameter whose gradient was not finite.
        loss: The loss of the update, which may be finite nevertheless.
    """

    update: int
    parameter: str
    loss: float


NOT_SKIPPED: Final = Mean(0.0, 1)
"""What most updates observe of ``"skipped"``."""

ValueT = TypeVar("ValueT", bool, float, "str | None")


class UpdateResult:
    """What one update did.

    Args:
        applied: See the attribute of this name; either its value, or a function that reads it from the device. This
            also holds for `loss_scale` and `nonfinite`.
        tries: The number of attempts; 1 unless a gradient was not finite.
        loss_scale: See the attribute of this name.
        nonfinite: See the attribute of this name.
        reports: What each shard of the last attempt measured, in order. Where the update computed several gradients,
            the reports of all of them.
        summed: Whether losses are sums over the samples of a shard instead of means.
        of_batch: Whether such sums add up to one loss over all samples, which in means over several updates counts as
            often as it has samples.
        parts: If the update computed gradients for single ones of several optimizers, the result of each by the
            optimizer's name. Several gradients for the same optimizer are merged.
        skipped: Whether the gradient was not finite, so that nothing was stepped by it; a 0-d tensor, above 0 if so,
            where only the device knows.
        grad_norm: See the attribute of this name.
        num_samples: See the attribute of this name.
    """

    def __init__(
        self,
        *,
        applied: bool | Callable[[], bool],
        tries: int,
        loss_scale: float | Callable[[], float],
        nonfinite: str | Callable[[], str | None] | None,
        reports: Sequence[ShardReport],
        summed: bool = False,
        of_batch: bool = False,
        parts: Mapping[str, UpdateResult] | None = None,
        skipped: bool | torch.Tensor = False,
        grad_norm: torch.Tensor | None = None,
        num_samples: int = 0,
    ) -> None:
        self.grad_norm = grad_norm
        """The norm of the gradients before they were clipped, on the device: a 0-d tensor; None without
        `clip_grad_norm`, and if nothing was stepped. Of several optimizers it is the norm of all gradients together."""
        self.num_samples = num_samples
        """The number of samples in the batches of the update, on all ranks, whatever they weigh. For a step function
        these are the batches of the main iterator, without those in which samples cannot be counted."""
        self.skipped_flag = skipped
        """Whether the gradient was not finite; a tensor where only the device knows."""
        self._applied = applied
        self.tries = tries
        self._loss_scale = loss_scale
        self._nonfinite = nonfinite
        self.reports = reports
        self.summed, self.of_batch = summed, of_batch
        self.parts: Mapping[str, UpdateResult] = {} if parts is None else parts

    def __getstate__(self) -> dict[str, Any]:
        """Read all values from the device, because a copy in another process could not."""
        read = {
            "skipped_flag": bool(self.skipped_flag),
            "_applied": self.applied,
            "_loss_scale": self.loss_scale,
            "_nonfinite": self.nonfinite,
        }
        return vars(self) | read

    def __repr__(self) -> str:
        metrics = {name: float(mean) for name, mean in self.metrics.items()}
        return (
            f"UpdateResult(applied={self.applied}, tries={self.tries}, loss={self.loss.item():.6g}, "
            f"weight={self.weight:g}, loss_scale={self.loss_scale:g}, metrics={metrics}, "
            f"nonfinite={self.nonfinite!r})"
        )

    @cached_property
    def applied(self) -> bool:
        """Whether the weights moved; waits for the device if that is decided there."""
        return _resolve(self._applied)

    @cached_property
    def loss_scale(self) -> float:
        """The loss scale factor of the last attempt; waits for the device if it is there."""
        return _resolve(self._loss_scale)

    @cached_property
    def nonfinite(self) -> str | None:
        """The name of the first non-finite parameter in the last attempt that had one; None if there was none.

        Reading it waits for the device if the check is there.
        """
        return _resolve(self._nonfinite)

    @cached_property
    def weight(self) -> float:
        """The total weight of the shards, which is the number of samples unless the loss function returned others."""
        total = 0.0
        # Not by `sum`, which compensates for rounding from Python 3.12 on and would have other bits there.
        for report in self.reports:
            total += report.weight
        return total

    @cached_property
    def loss(self) -> torch.Tensor:
        """The loss of the update, not scaled, as the mean or sum over all shards; NaN if no shard took part.

        It has no dimension and is in float64.
        """
        total = torch.as_tensor(self._loss_sum(), dtype=torch.float64)
        return total / self._loss_weight() if self.reports else total

    @cached_property
    def metrics(self) -> dict[str, Mean]:
        """The metrics that the loss function returned and that it and the model reported, over all shards."""
        names = dict.fromkeys(name for report in self.reports for name in report.metrics)
        return {name: merge(self._means(name)) for name in names}

    def loss_and_metrics(self) -> dict[str, Mean]:
        """Return the loss and the metrics by name, as means that can still be merged."""
        often = self.weight if self.of_batch else 1.0
        return {"loss": Mean(self._loss_sum() * often, self._loss_weight() * often), **self.metrics}

    def observation(self) -> dict[str, Mean]:
        """Return what a trainer observes: the loss, the metrics, and whether the update was skipped.

        ``"skipped"`` is 1 if the update was skipped because its gradient was not finite, and 0 otherwise. The other
        means of such an update have weight 0, so that they do not count in the mean of an interval.

        ``"grad_norm"`` is there if gradients are clipped.

        If the update has `parts`, return those of each part instead, under ``"name/loss"`` and so on.
        """
        if self.parts:
            return {
                f"{name}/{key}": mean for name, part in self.parts.items() for key, mean in part.observation().items()
            }
        skipped = self.skipped_flag
        means = self.loss_and_metrics()
        if self.grad_norm is not None:
            # A metric of the user's of this name takes precedence.
            means = {"grad_norm": Mean(self.grad_norm, 1), **means}
        if skipped is not False:
            # In float64, in which weights of more than 2^24 tokens stay exact.
            counts = 0.0 if skipped is True else 1.0 - skipped.double()
            means = {name: Mean(mean.total, mean.weight * counts) for name, mean in means.items()}
        flag = NOT_SKIPPED if skipped is False else Mean(1.0 if skipped is True else skipped, 1)
        return {"loss": means.pop("loss"), "skipped": flag, **means}

    def _loss_weight(self) -> float:
        """Return what `_loss_sum` is divided by: a summed loss is not divided."""
        return float(bool(self.reports)) if self.summed else self.weight

    def _loss_sum(self) -> float | torch.Tensor:
        """Sum weight times loss in order of shards, in float64: a Python float on CPUs, else a tensor on one device."""
        if not self.reports:
            return math.nan
        # Added one by one, as in `weight`: a stacked reduction would round by an order of its own.
        if all(report.loss.is_cpu for report in self.reports):
            # Python floats have the same float64 arithmetic as tensors, at a fraction of the time.
            number = 0.0
            for report in self.reports:
                number += report.loss.item() * self._factor(report)
            return number
        device = self.reports[0].loss.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for report in self.reports:
            total += report.loss.reshape(()).to(device, torch.float64) * self._factor(report)
        return total

    def _factor(self, report: ShardReport) -> float:
        return 1.0 if self.summed else report.weight

    def _means(self, name: str) -> list[Mean]:
        """List the values of one metric in order of shards, all on one device."""
        device = self.reports[0].loss.device
        parts = [report.metrics[name] for report in self.reports if name in report.metrics]
        return [Mean(_move(total, device), _move(weight, device)) for total, weight in parts]


def _move(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    return value.detach().to(device) if isinstance(value, torch.Tensor) else value


def _resolve(value: ValueT | Callable[[], ValueT]) -> ValueT:
    return value() if callable(value) else value
