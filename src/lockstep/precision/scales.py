"""Loss scales: a factor for the loss that keeps small gradients from vanishing in half precision.

A scale is a frozen value that names its successor: ``scale = scale.after(finite=True)``. It is saved as
its fields. Every scale has a floor and a ceiling; without a floor a run of bad updates drives the factor
to zero, and the next good gradient divided by it is NaN.

References: Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

from lockstep.errors import StateError

FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class LossScale(ABC):
    """The factor of one try, and the rule that gives the factor of the next.

    Attributes:
        factor: The loss is multiplied by it before backward, the gradient divided by it afterwards.
    """

    factor: float

    @abstractmethod
    def after(self, *, finite: bool) -> LossScale:
        """Give the scale that follows a try whose gradient was finite or not."""

    def state_dict(self) -> dict[str, float | int | bool]:
        """Give every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def restored(self, state: dict[str, float | int | bool]) -> LossScale:
        """Give a scale of this class with the fields that `state_dict` gave.

        Raises:
            StateError: Fields are missing or unknown.
        """
        names = {field.name for field in fields(self)}
        if set(state) != names:
            raise StateError(
                f"The state of a {type(self).__name__} must have the keys {sorted(names)}, "
                f"got {sorted(state)}."
            )
        return replace(self, **state)


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

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)

    def after(self, *, finite: bool) -> StaticLossScale:  # noqa: ARG002 - a static scale hears but does not listen
        """Give the same scale again."""
        return self


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Step down after an overflow, and up after a run of updates without one.

    Args:
        factor: The factor now.
        growth: What the factor is multiplied by after `interval` finite gradients in a row; above 1.
        backoff: What it is multiplied by after one that is not finite; in (0, 1).
        interval: At least 1.
        minimum: The floor, positive.
        maximum: The ceiling, at least `minimum`.
        finite_updates: How many finite gradients in a row the factor has seen.

    >>> DynamicLossScale(factor=8.0).after(finite=False).factor
    4.0
    >>> DynamicLossScale(factor=8.0, interval=1).after(finite=True).factor
    16.0
    """

    factor: float = 8.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14
    maximum: float = 2.0**24
    finite_updates: int = 0

    def __post_init__(self) -> None:
        _check_bounds(self.factor, self.minimum, self.maximum)
        if not (math.isfinite(self.growth) and self.growth > 1):
            raise ValueError(f"`growth` must be finite and above 1, got {self.growth}.")
        if not 0 < self.backoff < 1:
            raise ValueError(f"`backoff` must lie in (0, 1), got {self.backoff}.")
        if self.interval < 1:
            raise ValueError(f"`interval` must be at least 1, got {self.interval}.")

    def after(self, *, finite: bool) -> DynamicLossScale:
        """Give the scale for the next try."""
        if not finite:
            return replace(self, factor=max(self.factor * self.backoff, self.minimum), finite_updates=0)
        if self.finite_updates + 1 < self.interval:
            return replace(self, finite_updates=self.finite_updates + 1)
        return replace(self, factor=min(self.factor * self.growth, self.maximum), finite_updates=0)


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
        raise TypeError(
            f"`loss_scale` must be a number, a LossScale or None, got a {type(loss_scale).__name__}."
        )
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(f"`loss_scale` must be positive and finite, got {loss_scale}.")
    return StaticLossScale(float(loss_scale))


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be positive and finite, got {value}.")


def _check_bounds(factor: float, minimum: float, maximum: float) -> None:
    for name, value in (("factor", factor), ("minimum", minimum), ("maximum", maximum)):
        _check_positive(name, value)
    if not minimum <= factor <= maximum:
        raise ValueError(f"`factor` must lie in `minimum`..`maximum` ({minimum}..{maximum}), got {factor}.")
