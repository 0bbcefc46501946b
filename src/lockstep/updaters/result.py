"""What one update did; its numbers stay on the device until somebody looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from lockstep.metrics import Mean, merge


@dataclass(slots=True)
class ShardReport:
    """What one shard measured.

    Attributes:
        shard: Its index.
        weight: What its loss is the mean of.
        loss: The mean loss, one element, detached.
        metrics: (sum, weight) by name: what the loss function returned or what was reported.
    """

    shard: int
    weight: float
    loss: torch.Tensor
    metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NonFiniteShard:
    """A shard whose gradient is not finite.

    Attributes:
        shard: Its index.
        batch: Which of the update's batches it is cut from.
        samples: Which samples of that batch.
        loss: Its mean loss, which may be finite all the same.
        parameter: The name of the first parameter whose gradient is not finite.
    """

    shard: int
    batch: int
    samples: range
    loss: float
    parameter: str


ValueT = TypeVar("ValueT", bool, float, "str | None")


class UpdateResult:
    """What one update did.

    Args:
        applied: See the attribute; or a function that looks it up on the device. So for the next two.
        tries: How often gradients were computed; 1 unless they were not finite at first.
        loss_scale: See the attribute.
        nonfinite: See the attribute.
        reports: What each shard of the last try measured, in order; of all computations where the update made
            several.
        parts: Where the update made several computations for different optimizers, what each came to, by the
            optimizer's name. Computations for the same one are taken together.
    """

    def __init__(
        self,
        *,
        applied: bool | Callable[[], bool],
        tries: int,
        loss_scale: float | Callable[[], float],
        nonfinite: str | Callable[[], str | None] | None,
        reports: Sequence[ShardReport],
        parts: Mapping[str, UpdateResult] | None = None,
    ) -> None:
        self._applied = applied
        self.tries = tries
        self._loss_scale = loss_scale
        self._nonfinite = nonfinite
        self.reports = reports
        self.parts: Mapping[str, UpdateResult] = {} if parts is None else parts

    def __getstate__(self) -> dict[str, Any]:
        """Read what is on the device: whoever gets a copy, say in another process, could not."""
        read = {"_applied": self.applied, "_loss_scale": self.loss_scale, "_nonfinite": self.nonfinite}
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
        """The factor of the last try; waits for the device if it is there."""
        return _resolve(self._loss_scale)

    @cached_property
    def nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite in the last bad try, or None.

        Waits for the device if that is known there.
        """
        return _resolve(self._nonfinite)

    @cached_property
    def weight(self) -> float:
        """The summed weight of the shards: samples, unless the loss function said otherwise."""
        return sum(report.weight for report in self.reports)

    @cached_property
    def loss(self) -> torch.Tensor:
        """The mean loss over all shards, 0-d, float64, not scaled; NaN where no shard took part."""
        total = torch.as_tensor(self._loss_sum(), dtype=torch.float64)
        return total / self.weight if self.reports else total

    @cached_property
    def metrics(self) -> dict[str, Mean]:
        """What the loss function returned and what it and the model reported, over all shards."""
        names = dict.fromkeys(name for report in self.reports for name in report.metrics)
        return {name: merge(self._means(name)) for name in names}

    def observation(self) -> dict[str, Mean]:
        """Give the loss and the metrics by name, as means that can still be merged.

        Of an update with `parts` those of each part, under ``"name/loss"`` and so on.
        """
        if self.parts:
            return {
                f"{name}/{key}": mean for name, part in self.parts.items() for key, mean in part.observation().items()
            }
        return {"loss": Mean(self._loss_sum(), self.weight), **self.metrics}

    def _loss_sum(self) -> float | torch.Tensor:
        """Sum weight times loss in order of shards, in float64: a number on CPUs, else on one device."""
        if not self.reports:
            return math.nan
        if all(report.loss.device.type == "cpu" for report in self.reports):
            return sum(report.loss.item() * report.weight for report in self.reports)
        device = self.reports[0].loss.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for report in self.reports:
            total += report.loss.reshape(()).to(device, torch.float64) * report.weight
        return total

    def _means(self, name: str) -> list[Mean]:
        """List one metric's parts in order of shards, all on one device."""
        device = self.reports[0].loss.device
        parts = [report.metrics[name] for report in self.reports if name in report.metrics]
        return [Mean(_move(total, device), _move(weight, device)) for total, weight in parts]


def _move(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    return value.detach().to(device) if isinstance(value, torch.Tensor) else value


def _resolve(value: ValueT | Callable[[], ValueT]) -> ValueT:
    return value() if callable(value) else value
