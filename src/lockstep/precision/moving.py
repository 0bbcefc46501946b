"""A loss scale on its way: its numbers are on the host or on a device, and move there without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.precision.finite import sent
from lockstep.precision.scales import LossScale


class MovingScale:
    """A loss scale at one moment, wherever its numbers are; it returns its successor.

    It begins as a value. After the first flag its numbers are tensors on that flag's device, with the same
    bits. Looking at `value` waits for them, and makes it a value again.

    Args:
        scale: Of the policy it is; its moving fields count where `moving` has none.
        moving: The factor and the moving fields by name, as tensors on one device: 0-d and float64.

    >>> from lockstep.precision import DynamicLossScale
    >>> scale = MovingScale(DynamicLossScale(factor=8.0)).after(torch.ones(()))
    >>> scale.factor_on(torch.device("cpu")), scale.value.factor
    (tensor(4., dtype=torch.float64), 4.0)
    """

    def __init__(self, scale: LossScale, moving: dict[str, Tensor] | None = None) -> None:
        self._scale = scale
        self._moving = moving or {}
        self.is_fixed = not scale.moving
        """Whether no gradient moves it, so that its value is known without looking."""

    @property
    def policy(self) -> type[LossScale]:
        """Which policy it follows."""
        return type(self._scale)

    @property
    def value(self) -> LossScale:
        """The scale as a value, the same object every time; waits for the device if it is there."""
        if self._moving and not self.is_fixed:
            self._scale, self._moving = self._scale.with_moving(self._moving), {}
        return self._scale

    def factor_on(self, device: torch.device) -> Tensor:
        """Bring the numbers to a device, and give the factor there: 0-d and float64."""
        if not self._moving:
            factor = torch.full((), self._scale.factor, dtype=torch.float64, device=device)
            self._moving = {"factor": factor, **self._scale.moving_on(device)}
        elif self._moving["factor"].device != device:
            self._moving = {name: sent(value, device) for name, value in self._moving.items()}
        return self._moving["factor"]

    def after(self, nonfinite: Tensor, *, given: MovingScale | None = None) -> MovingScale:
        """Choose the next scale, on the device of the flag; nothing waits for it.

        Args:
            nonfinite: 0-d; above 0 after a gradient that was not finite.
            given: The scale that gradient was computed with, if this one may have moved on since: then the
                gradient can lower it, and no longer raise it.
        """
        if self.is_fixed:
            return self
        if given is not None and given is not self:
            return self._lower_of(given.after(nonfinite), nonfinite.device)
        self.factor_on(nonfinite.device)
        following = self._scale.after_on_device(self._moving, nonfinite)
        return MovingScale(self._scale, {**self._moving, **following})

    def _lower_of(self, other: MovingScale, device: torch.device) -> MovingScale:
        """Choose the one of a lower factor, this one if they are equal."""
        is_lower = other.factor_on(device) < self.factor_on(device)
        pairs = {name: (other._moving[name], value) for name, value in self._moving.items()}
        return MovingScale(self._scale, {name: torch.where(is_lower, *pair) for name, pair in pairs.items()})
