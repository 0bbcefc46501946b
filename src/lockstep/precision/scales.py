"""Loss scales: a factor for the loss that keeps small gradients from vanishing in half precision.

A scale is a frozen value that names its successor: ``scale = scale.after(finite=True)``. It is saved as
its fields. Every scale has a floor and a ceiling; without a floor a run of bad updates drives the factor
to zero, and the next good gradient divided by it is NaN.

References: Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.state import check_keys

FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class LossScale(ABC):
    """The factor of one try, and the rule that gives the factor of the next.

    Attributes:
        factor: The loss is multiplied by it before backward, the gradient divided by it afterwards.
    """

    factor: float

    moving: ClassVar[tuple[str, ...]] = ("factor",)
    """The fields that `after` changes."""

    @abstractmethod
    def after(self, *, finite: bool) -> LossScale:
        """Give the scale that follows a try whose gradient was finite or not."""

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Do what `after` does to the moving fields where they are tensors.

        The policies of this module do it on the device, with the same bits as `after`. One that has only
        `after` gets this, which waits for the device.

        Args:
            moving: The moving fields by name, each 0-d and float64, on one device.
            nonfinite: 0-d, on the same device; true or above 0 after a gradient that was not finite.
        """
        now = self.with_moving(moving)
        return now.after(finite=not bool(nonfinite)).moving_on(nonfinite.device)

    def moving_on(self, device: torch.device) -> dict[str, Tensor]:
        """Give the moving fields as tensors on a device, 0-d and float64."""
        return {
            name: torch.full((), float(getattr(self, name)), dtype=torch.float64, device=device) for name in self.moving
        }

    def with_moving(self, moving: Mapping[str, Tensor]) -> LossScale:
        """Give this scale with its moving fields read from tensors; waits for their device."""
        names = list(self.moving)
        values = torch.stack([moving[name] for name in names]).tolist() if names else []
        kinds = [type(getattr(self, name)) for name in names]
        return replace(self, **{name: kind(value) for name, kind, value in zip(names, kinds, values, strict=True)})

    def state_dict(self) -> dict[str, float | int | bool | None]:
        """Give every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def restored(self, state: Mapping[str, float | int | bool | None]) -> LossScale:
        """Give a scale of this class with the fields that `state_dict` gave.

        Raises:
            StateError: Fields are missing or unknown.
            ValueError: A field is out of range.
        """
        check_keys(state, [field.name for field in fields(self)], of=f"a {type(self).__name__}")
        return replace(self, **state)  # type: ignore[arg-type]  # each field has its own type


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """One factor for ever.

    Args:
        factor: Positive and finite; a power of two changes no bit of a float32 or float64 gradient
            that neither overflows nor underflows.

    >>> StaticLossScale(128.0).after(finite=False)
    StaticLossScale(factor=128.0)
    """

    factor: float = 1.0

    moving: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)

    def after(self, *, finite: bool) -> StaticLossScale:  # noqa: ARG002 - a static scale hears but does not listen
        """Give the same scale again."""
        return self

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - as above
        """Give the same fields, none, again."""
        return dict(moving)


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Step down after an overflow, and up after a run of updates without one.

    Args:
        factor: The factor now.
        growth: What the factor is multiplied by after `interval` finite gradients in a row; above 1.
        backoff: What it is multiplied by after one that is not finite; in (0, 1). None to divide by
            `growth`, which rounds otherwise where `growth` is no power of two.
        interval: At least 1.
        minimum: The floor, positive.
        maximum: The ceiling, at least `minimum`.
        finite_updates: How many finite gradients in a row the factor has seen; -`uncounted` at the least.
        uncounted: How many finite gradients after an overflow do not count, at least 0; see
            `nnabla_loss_scale`, which alone needs it.

    >>> DynamicLossScale(factor=8.0).after(finite=False).factor
    4.0
    >>> DynamicLossScale(factor=8.0, interval=1).after(finite=True).factor
    16.0
    """

    factor: float = 8.0
    growth: float = 2.0
    backoff: float | None = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14
    maximum: float = 2.0**24
    finite_updates: int = 0
    uncounted: int = 0

    moving: ClassVar[tuple[str, ...]] = ("factor", "finite_updates")

    def __post_init__(self) -> None:
        _check_bounds(self.factor, self.minimum, self.maximum)
        if not (math.isfinite(self.growth) and self.growth > 1):
            raise ValueError(f"`growth` must be finite and above 1, got {self.growth}.")
        if self.backoff is not None and not 0 < self.backoff < 1:
            raise ValueError(f"`backoff` must lie in (0, 1), got {self.backoff}.")
        if not self.interval >= 1:
            raise ValueError(f"`interval` must be at least 1, got {self.interval}.")
        if not self.uncounted >= 0:
            raise ValueError(f"`uncounted` must be at least 0, got {self.uncounted}.")
        if not -self.uncounted <= self.finite_updates < self.interval:
            raise ValueError(
                f"`finite_updates` must lie in -`uncounted`..`interval` - 1 ({-self.uncounted}.."
                f"{self.interval - 1}), got {self.finite_updates}."
            )

    def after(self, *, finite: bool) -> DynamicLossScale:
        """Give the scale for the next try."""
        if not finite:
            lower = self.factor / self.growth if self.backoff is None else self.factor * self.backoff
            return replace(self, factor=max(lower, self.minimum), finite_updates=-self.uncounted)
        if self.finite_updates + 1 < self.interval:
            return replace(self, finite_updates=self.finite_updates + 1)
        return replace(self, factor=min(self.factor * self.growth, self.maximum), finite_updates=0)

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Give the moving fields for the next try; nothing waits for the device."""
        factor, bad = moving["factor"], nonfinite.bool()
        lower = factor / self.growth if self.backoff is None else factor * self.backoff
        run = moving["finite_updates"] + 1
        grows = run >= self.interval
        higher = torch.where(grows, (factor * self.growth).clamp(max=self.maximum), factor)
        return {
            "factor": torch.where(bad, lower.clamp(min=self.minimum), higher),
            "finite_updates": torch.where(bad, -self.uncounted, torch.where(grows, 0, run)).double(),
        }


@dataclass(frozen=True)
class RampLossScale(LossScale):
    """Double after every finite gradient until the first overflow ever, then creep.

    After that first overflow a finite gradient multiplies the factor by ``2**(1/interval)``; an overflow
    always halves it.

    Args:
        factor: The factor now.
        interval: Finite updates it takes to double after the first overflow; at least 1.
        minimum: The floor, positive.
        maximum: The ceiling, at least `minimum`; by default the largest float16.
        overflowed: Whether there has been an overflow.

    References: Chainer 7.8.1, ``GradientMethod.loss_scaling``.

    >>> RampLossScale().after(finite=True).after(finite=True).factor
    4.0
    """

    factor: float = 1.0
    interval: float = 1000
    minimum: float = 1.0
    maximum: float = FLOAT16_MAX
    overflowed: bool = False

    moving: ClassVar[tuple[str, ...]] = ("factor", "overflowed")

    def __post_init__(self) -> None:
        _check_bounds(self.factor, self.minimum, self.maximum)
        if not self.interval >= 1:
            raise ValueError(f"`interval` must be at least 1, got {self.interval}.")

    def after(self, *, finite: bool) -> RampLossScale:
        """Give the scale for the next try."""
        if not finite:
            return replace(self, factor=max(self.factor * 0.5, self.minimum), overflowed=True)
        growth = 2.0 ** (1.0 / self.interval) if self.overflowed else 2.0
        return replace(self, factor=min(self.factor * growth, self.maximum))

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Give the moving fields for the next try; nothing waits for the device."""
        factor, bad = moving["factor"], nonfinite.bool()
        creeping = factor * 2.0 ** (1.0 / self.interval)
        higher = torch.where(moving["overflowed"].bool(), creeping, factor * 2.0).clamp(max=self.maximum)
        return {
            "factor": torch.where(bad, (factor * 0.5).clamp(min=self.minimum), higher),
            "overflowed": torch.where(bad, 1.0, moving["overflowed"]),
        }


def nnabla_loss_scale(
    factor: float = 8.0,
    growth: float = 2.0,
    interval: int = 2000,
    *,
    minimum: float = DynamicLossScale.minimum,
    maximum: float = DynamicLossScale.maximum,
) -> DynamicLossScale:
    """Count as NNabla's updater does: grow one later than the interval says, two after an overflow.

    NNabla compares before it counts. With its N the first growth comes with finite gradient N + 2, later
    ones every N + 1, and N + 2 after an overflow; a negative N grows every time.

    Args:
        factor: The factor at the start.
        growth: NNabla's ``scaling_factor``, above 1; multiplied by, and divided by after an overflow.
        interval: NNabla's N.
        minimum: The floor, which NNabla lacks.
        maximum: The ceiling, which NNabla lacks.

    Raises:
        ValueError: A number is out of range.

    References: nnabla 1.35.1, ``DynamicLossScalingUpdater.update``.

    >>> scale = nnabla_loss_scale(interval=1)
    >>> for _ in range(5):
    ...     scale = scale.after(finite=True)
    ...     print(scale.factor)
    8.0
    8.0
    16.0
    16.0
    32.0
    """
    uncounted = 1 if interval >= 0 else 0
    return DynamicLossScale(
        factor=factor,
        growth=growth,
        backoff=None,
        interval=max(interval + 1, 1),
        minimum=minimum,
        maximum=maximum,
        finite_updates=-uncounted,
        uncounted=uncounted,
    )


def parse_loss_scale(loss_scale: LossScale | float | None) -> LossScale:
    """Take a policy as it is, a number as a static scale, and nothing as the factor 1.

    Raises:
        TypeError: It is none of these.
        ValueError: The number is not positive and finite.
    """
    if loss_scale is None:
        return StaticLossScale()
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        raise TypeError(f"`loss_scale` must be a number, a LossScale or None, got a {type(loss_scale).__name__}.")
    _check_positive("loss_scale", loss_scale)
    return StaticLossScale(float(loss_scale))


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be positive and finite, got {value}.")


def _check_bounds(factor: float, minimum: float, maximum: float) -> None:
    for name, value in (("factor", factor), ("minimum", minimum), ("maximum", maximum)):
        _check_positive(name, value)
    if not minimum <= factor <= maximum:
        raise ValueError(f"`factor` must lie in `minimum`..`maximum` ({minimum}..{maximum}), got {factor}.")
