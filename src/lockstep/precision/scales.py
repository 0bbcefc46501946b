"""Policies for the loss scale as frozen values, and the gradient with which backward starts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.arguments import check_number
from lockstep.precision.finite import to_device
from lockstep.precision.policy import HALF_PRECISION
from lockstep.state import check_keys

FLOAT16_MAX = 65504.0
"""The largest float16."""


@dataclass(frozen=True)
class LossScale(ABC):
    """The factor of one attempt at an update, and the policy that defines the factor of the next attempt.

    Attributes:
        factor: The number that the loss is multiplied by before backward, and gradients are divided by afterwards.
    """

    factor: float

    moving: ClassVar[tuple[str, ...]] = ("factor",)
    """The names of the fields that `after` changes."""

    @abstractmethod
    def after(self, *, finite: bool) -> LossScale:
        """Return the scale for the next attempt.

        Args:
            finite: Whether the gradient of this attempt was finite.
        """

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Compute the moving fields for the next attempt from tensors.

        The policies of this module compute them on the device, with the same bits as `after`. A policy that defines
        only `after` inherits this implementation, which waits for the device.

        Args:
            moving: The moving fields by name, as 0-d float64 tensors on one device.
            nonfinite: A flag on the same device: 0-d, true or above 0 if the gradient was not finite.

        Returns:
            The moving fields of the next scale, like `moving`.
        """
        now = self.with_moving(moving)
        return now.after(finite=not bool(nonfinite)).moving_on(nonfinite.device)

    def moving_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the moving fields by name, as 0-d float64 tensors.

        Args:
            device: The device of the tensors.
        """
        # A float64 holds every Python float exactly, and every count that occurs.
        return {
            name: torch.full((), float(getattr(self, name)), dtype=torch.float64, device=device) for name in self.moving
        }

    def with_moving(self, moving: Mapping[str, Tensor]) -> LossScale:
        """Return this scale with other moving fields, after waiting for their device.

        Args:
            moving: The moving fields by name, as 0-d tensors on one device.
        """
        names = list(self.moving)
        # The fields are stacked, so that the host waits for a single copy.
        values = torch.stack([moving[name] for name in names]).tolist() if names else []
        kinds = [type(getattr(self, name)) for name in names]
        return replace(self, **{name: kind(value) for name, kind, value in zip(names, kinds, values, strict=True)})

    def state_dict(self) -> dict[str, float | int | bool | None]:
        """Return all fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def restored(self, state: Mapping[str, float | int | bool | None]) -> LossScale:
        """Return a scale of this class with saved fields.

        Args:
            state: Fields that `state_dict` returned.

        Raises:
            StateError: If fields are missing or unknown.
            ValueError: If a field is out of range.
        """
        check_keys(state, [field.name for field in fields(self)], of=f"a {type(self).__name__}")
        return replace(self, **state)  # type: ignore[arg-type]  # each field has its own type


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A loss scale with a constant factor.

    Args:
        factor: The factor, positive and finite. A power of two changes no bit of a float32 or float64 gradient
            that neither overflows nor underflows.

    >>> StaticLossScale(128.0).after(finite=False)
    StaticLossScale(factor=128.0)
    """

    factor: float = 1.0

    moving: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0, finite=True)

    def after(self, *, finite: bool) -> StaticLossScale:  # noqa: ARG002 - a static scale does not depend on it
        """Return this scale."""
        return self

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - as above
        """Return the same fields, of which there are none."""
        return dict(moving)


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that is lowered after an overflow, and raised after several finite gradients in a row.

    Args:
        factor: The current factor.
        growth: The number by which the factor is multiplied after `interval` finite gradients in a row; above 1.
        backoff: The number by which the factor is multiplied after a gradient that is not finite; in (0, 1). None to
            divide by `growth`, which rounds differently if `growth` is not a power of two.
        interval: The number of finite gradients in a row after which the factor grows, at least 1.
        minimum: The smallest factor, positive.
        maximum: The largest factor, at least `minimum`.
        finite_updates: The number of finite gradients in a row so far, at least -`uncounted`.
        uncounted: The number of finite gradients after an overflow that do not count, at least 0. Only
            `nnabla_loss_scale` needs it.

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
        check_number("growth", self.growth, above=1, finite=True)
        # The conditions also fail for NaN.
        if self.backoff is not None and not 0 < self.backoff < 1:
            raise ValueError(f"`backoff` must lie in (0, 1), got {self.backoff}.")
        check_number("interval", self.interval, least=1)
        check_number("uncounted", self.uncounted, least=0)
        if not -self.uncounted <= self.finite_updates < self.interval:
            raise ValueError(
                f"`finite_updates` must lie in -`uncounted`..`interval` - 1 ({-self.uncounted}.."
                f"{self.interval - 1}), got {self.finite_updates}."
            )

    def after(self, *, finite: bool) -> DynamicLossScale:
        """Return the scale for the next attempt; see `LossScale.after`."""
        if not finite:
            lower = self.factor / self.growth if self.backoff is None else self.factor * self.backoff
            return replace(self, factor=max(lower, self.minimum), finite_updates=-self.uncounted)
        if self.finite_updates + 1 < self.interval:
            return replace(self, finite_updates=self.finite_updates + 1)
        return replace(self, factor=min(self.factor * self.growth, self.maximum), finite_updates=0)

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Compute the moving fields for the next attempt without waiting; see `LossScale.after_on_device`."""
        # These are the operations of `after` in the same order, because the bits must be the same. `where` chooses
        # between results that are all computed, as the host does not know the flag. In place where that is possible:
        # new memory, and a tensor for a number, each cost a small model as much time as an operation.
        factor, bad = moving["factor"], nonfinite.bool()
        lower = factor / self.growth if self.backoff is None else factor * self.backoff
        run = moving["finite_updates"] + 1
        grows = run >= self.interval
        higher = torch.where(grows, (factor * self.growth).clamp_(max=self.maximum), factor)
        return {
            "factor": torch.where(bad, lower.clamp_(min=self.minimum), higher),
            "finite_updates": run.masked_fill_(grows, 0.0).masked_fill_(bad, -self.uncounted),
        }


@dataclass(frozen=True)
class RampLossScale(LossScale):
    """A loss scale that doubles after every finite gradient until the first overflow, and then grows slowly.

    After the first overflow, a finite gradient multiplies the factor by ``2**(1/interval)``. Every overflow halves
    the factor.

    Args:
        factor: The current factor.
        interval: The number of finite gradients that double the factor after the first overflow; at least 1.
        minimum: The smallest factor, positive.
        maximum: The largest factor, at least `minimum`; by default the largest float16.
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
        check_number("interval", self.interval, least=1)

    def after(self, *, finite: bool) -> RampLossScale:
        """Return the scale for the next attempt; see `LossScale.after`."""
        if not finite:
            return replace(self, factor=max(self.factor * 0.5, self.minimum), overflowed=True)
        growth = 2.0 ** (1.0 / self.interval) if self.overflowed else 2.0
        return replace(self, factor=min(self.factor * growth, self.maximum))

    def after_on_device(self, moving: Mapping[str, Tensor], nonfinite: Tensor) -> dict[str, Tensor]:
        """Compute the moving fields for the next attempt without waiting; see `LossScale.after_on_device`."""
        # The growth is computed on the host as in `after`: a device may round a power differently.
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
    interval: float = 2000,
    *,
    minimum: float = DynamicLossScale.minimum,
    maximum: float = DynamicLossScale.maximum,
) -> DynamicLossScale:
    """Return a scale that counts as NNabla's updater does.

    NNabla compares before it counts. With its interval N the factor first grows at finite gradient N + 2, then every
    N + 1 gradients, and N + 2 gradients after an overflow. With a negative N it grows every time.

    Args:
        factor: The factor at the start.
        growth: The ``scaling_factor`` of NNabla, above 1. The factor is multiplied by it, and divided by it after an
            overflow.
        interval: The interval N of NNabla, of which a fraction counts for nothing, as in NNabla.
        minimum: The smallest factor, which NNabla does not have.
        maximum: The largest factor, which NNabla does not have.

    Raises:
        ValueError: If a number is out of range.

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
    if not math.isfinite(interval):
        raise ValueError(
            f"`interval` must be finite, got {interval} (the `N` of NNabla). Use a `StaticLossScale` for one that "
            "never grows."
        )
    whole = math.floor(interval)
    uncounted = 1 if whole >= 0 else 0
    return DynamicLossScale(
        factor=factor,
        growth=growth,
        backoff=None,
        interval=max(whole + 1, 1),
        minimum=minimum,
        maximum=maximum,
        finite_updates=-uncounted,
        uncounted=uncounted,
    )


def parse_loss_scale(loss_scale: LossScale | float | None) -> LossScale:
    """Return the loss scale that a user has passed in one of several forms.

    Args:
        loss_scale: A loss scale, a number for a static one, or None for the factor 1.

    Raises:
        TypeError: If `loss_scale` is not one of these.
        ValueError: If `loss_scale` is a number that is not positive and finite.
    """
    if loss_scale is None:
        return StaticLossScale()
    if isinstance(loss_scale, LossScale):
        return loss_scale
    # A bool is an int in Python, and almost certainly a mistake here.
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        rule = f"must be a number, a LossScale or None, got a {type(loss_scale).__name__}"
        raise TypeError(f"`loss_scale` {rule}. Pass lockstep.DynamicLossScale(2.0**16).")
    check_number("loss_scale", loss_scale, above=0, finite=True)
    return StaticLossScale(float(loss_scale))


def _check_bounds(factor: float, minimum: float, maximum: float) -> None:
    for name, value in (("factor", factor), ("minimum", minimum), ("maximum", maximum)):
        check_number(name, value, above=0, finite=True)
    if not minimum <= factor <= maximum:
        raise ValueError(f"`factor` must lie in `minimum`..`maximum` ({minimum}..{maximum}), got {factor}.")


class CurrentScale:
    """A loss scale at one point in training, with its numbers on the host or on a device.

    It starts as a value on the host. After the first flag its numbers are tensors on the device of that flag, with
    the same bits. Reading `value` waits for them, and moves them back to the host.

    Args:
        scale: The loss scale, which defines the policy. Its fields are used where `moving` holds none.
        moving: The factor and the moving fields by name, as 0-d float64 tensors on one device.

    >>> from lockstep.precision import DynamicLossScale
    >>> scale = CurrentScale(DynamicLossScale(factor=8.0)).after(torch.ones(()))
    >>> scale.factor_on(torch.device("cpu")), scale.value.factor
    (tensor(4., dtype=torch.float64), 4.0)
    """

    def __init__(self, scale: LossScale, moving: dict[str, Tensor] | None = None) -> None:
        self._scale = scale
        self._moving = moving or {}
        self.fixed_factor = None if scale.moving else scale.factor
        """The factor of a scale that never changes; None for any other."""

    @property
    def scale_class(self) -> type[LossScale]:
        """The class of the loss scale."""
        return type(self._scale)

    @property
    def value(self) -> LossScale:
        """The loss scale as a value, the same object every time. Reading it waits for the device if necessary."""
        if self._moving and self.fixed_factor is None:
            # The value is stored, so that a second read does not wait again.
            self._scale, self._moving = self._scale.with_moving(self._moving), {}
        return self._scale

    def factor_on(self, device: torch.device) -> Tensor:
        """Move the numbers to a device, and return the factor there.

        Args:
            device: The device to move the numbers to.

        Returns:
            The factor: 0-d, float64.
        """
        if not self._moving:
            factor = torch.full((), self._scale.factor, dtype=torch.float64, device=device)
            self._moving = {"factor": factor, **self._scale.moving_on(device)}
        elif self._moving["factor"].device != device:
            self._moving = {name: to_device(value, device) for name, value in self._moving.items()}
        return self._moving["factor"]

    def after(self, nonfinite: Tensor, *, given: CurrentScale | None = None) -> CurrentScale:
        """Return the next scale, computed on the device of the flag without waiting for it.

        Args:
            nonfinite: The flag: 0-d, above 0 if the gradient was not finite.
            given: The scale with which the gradient was computed, if this scale may have changed since. The
                gradient can then lower this scale, but not raise it.
        """
        if self.fixed_factor is not None:
            return self
        if given is not None and given is not self:
            return self._lower_of(given.after(nonfinite), nonfinite.device)
        self.factor_on(nonfinite.device)
        following = self._scale.after_on_device(self._moving, nonfinite)
        return CurrentScale(self._scale, {**self._moving, **following})

    def _lower_of(self, other: CurrentScale, device: torch.device) -> CurrentScale:
        """Return the scale with the lower factor, or this one if the factors are equal."""
        is_lower = other.factor_on(device) < self.factor_on(device)
        # All fields are taken from the same scale: a factor and a count of two scales would belong to no policy.
        pairs = {name: (other._moving[name], value) for name, value in self._moving.items()}
        return CurrentScale(self._scale, {name: torch.where(is_lower, *pair) for name, pair in pairs.items()})


def initial_gradient(
    loss: Tensor, factor: float | Tensor, weight: float = 1.0, total: float = 1.0
) -> tuple[Tensor | None, float | Tensor | None]:
    """Return the gradient with which backward starts, to compute that of loss · factor · weight / total.

    Half precision holds few numbers: in bfloat16 a first gradient of 257 would become 256. For a loss in half
    precision, backward therefore starts with the largest power of two that is not above the factor, times the number
    of that format that is nearest to weight / total. You must multiply the resulting gradients by the rest.

    Args:
        loss: The loss, a tensor of one element.
        factor: The factor, which must be positive: a number, or a 0-d float64 tensor on any device.
        weight: The weight of the loss in a mean, above 0.
        total: The sum of the weights of all losses in this mean.

    Returns:
        The first gradient, or None for a gradient of 1; and the rest, or None for 1.

    Determinism: nothing is rounded but the product, to the format of the loss unless that is half precision.

    >>> initial_gradient(torch.tensor(0.5, dtype=torch.bfloat16), 257.0)
    (tensor(256., dtype=torch.bfloat16), 1.00390625)
    >>> initial_gradient(torch.tensor(0.5, dtype=torch.bfloat16), 1.0, weight=4, total=12)
    (tensor(0.3340, dtype=torch.bfloat16), 0.9980506822612085)
    """
    rest: float | Tensor | None = None
    if loss.dtype in HALF_PRECISION:
        factor, rest = _split(factor)
        share = weight / total
        mantissa, exponent = math.frexp(share)
        spacing = torch.finfo(loss.dtype).eps / 2
        nearest = math.ldexp(round(mantissa / spacing) * spacing, exponent)
        if nearest != share:
            rest = share / nearest * (1.0 if rest is None else rest)
            weight, total = nearest, 1.0
    if weight != 1.0 or total != 1.0:
        factor = factor * weight / total
    if isinstance(factor, Tensor):
        # Copied, because a hook of yours may change the gradient in place, and the factor belongs to the loss scale.
        return to_device(factor, loss.device).to(loss.dtype, copy=True).reshape(loss.shape), rest
    # None saves the creation of a tensor in the usual case.
    if factor == 1.0 and loss.dim() == 0:
        return None, rest
    return torch.full_like(loss, factor), rest


def multiply_(gradients: Sequence[Tensor | None], rest: float | Tensor) -> None:
    """Multiply gradients by the rest of a factor.

    Args:
        gradients: The gradients, or None for missing ones. Changed in place.
        rest: The rest, as `initial_gradient` returned it.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(to_device(rest, gradient.device) if isinstance(rest, Tensor) else rest)


def _split(factor: float | Tensor) -> tuple[float | Tensor, float | Tensor | None]:
    """Split a factor into a power of two and a rest in [1, 2), without rounding."""
    if isinstance(factor, Tensor):
        # A comparison with 1 would wait for the device, so gradients are multiplied by a rest of 1 as well.
        rest = torch.frexp(factor).mantissa * 2.0
        return factor / rest, rest
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(1.0, exponent - 1), None if mantissa == 0.5 else mantissa * 2.0  # noqa: PLR2004 - of a power of two
