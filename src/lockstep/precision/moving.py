"""A loss scale on its way: its numbers are on the host or on a device, and move there without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.precision.finite import sent
from lockstep.precision.scales import LossScale


class ScaleThen:
    """A loss scale at one moment, wherever its numbers are; the scale may have moved on since.

    Args:
        scale: Of the policy it is; its moving fields count where `moving` has none.
        moving: The moving fields as tensors on one device.
        factor: The factor there.
    """

    def __init__(
        self, scale: LossScale, moving: dict[str, Tensor] | None = None, factor: Tensor | None = None
    ) -> None:
        self._scale = scale
        self._moving = moving or {}
        self._factor = factor
        self.is_fixed = not scale.moving
        """Whether no gradient moves it, so that its value is known without looking."""

    @property
    def policy(self) -> type[LossScale]:
        """Which policy it follows."""
        return type(self._scale)

    @property
    def value(self) -> LossScale:
        """The scale as a value, the same object every time; waits for the device if it is there."""
        if self._moving:
            self._scale = self._scale.with_moving(self._moving)
            self._moving, self._factor = {}, None
        return self._scale

    def factor_on(self, device: torch.device) -> Tensor:
        """Bring the numbers to a device, and give the factor there: 0-d and float64."""
        if self._factor is None:
            self._moving = self._scale.moving_on(device)
            fixed = torch.full((), self._scale.factor, dtype=torch.float64, device=device)
            self._factor = self._moving.get("factor", fixed)
        elif self._factor.device != device:
            self._moving = {name: sent(value, device) for name, value in self._moving.items()}
            self._factor = self._moving.get("factor", sent(self._factor, device))
        return self._factor

    def after(self, nonfinite: Tensor) -> ScaleThen:
        """Choose what follows, on the device of the flag; nothing waits for it.

        Args:
            nonfinite: 0-d; above 0 after a gradient that was not finite.
        """
        factor = self.factor_on(nonfinite.device)
        moving = self._scale.after_on_device(self._moving, nonfinite)
        return ScaleThen(self._scale, moving, moving.get("factor", factor))

    def lower_of(self, other: ScaleThen, device: torch.device) -> ScaleThen:
        """Choose the one of a lower factor, this one if they are equal; nothing waits for the device."""
        ours, theirs = self.factor_on(device), other.factor_on(device)
        lower = theirs < ours
        moving = {name: torch.where(lower, other._moving[name], ours) for name, ours in self._moving.items()}
        return ScaleThen(self._scale, moving, torch.where(lower, theirs, ours))


class MovingScale:
    """The loss scale of the next try, wherever its numbers are.

    It begins as a value. With the first flag its numbers become tensors on that flag's device, and follow
    there with the same bits. Looking at `value` waits for them, and makes it a value again.

    Args:
        scale: The first one.

    >>> from lockstep.precision import DynamicLossScale
    >>> scale = MovingScale(DynamicLossScale(factor=8.0))
    >>> scale.follow(torch.ones(()))
    >>> scale.factor_on(torch.device("cpu")), scale.value.factor
    (tensor(4., dtype=torch.float64), 4.0)
    """

    def __init__(self, scale: LossScale) -> None:
        self.now = ScaleThen(scale)
        """The scale at this moment; another object when it moves."""

    @property
    def is_fixed(self) -> bool:
        """Whether no gradient moves it, so that its value is known without looking."""
        return self.now.is_fixed

    @property
    def policy(self) -> type[LossScale]:
        """Which policy it follows."""
        return self.now.policy

    @property
    def value(self) -> LossScale:
        """The scale as a value, the same object until it moves; waits for the device if it is there."""
        return self.now.value

    @value.setter
    def value(self, scale: LossScale) -> None:
        self.now = ScaleThen(scale)

    def factor_on(self, device: torch.device) -> Tensor:
        """Bring the numbers to a device, and give the factor there: 0-d and float64."""
        return self.now.factor_on(device)

    def follow(self, nonfinite: Tensor, *, given: ScaleThen | None = None) -> None:
        """Choose the next scale, on the device of the flag; nothing waits for it.

        Args:
            nonfinite: 0-d; above 0 after a gradient that was not finite.
            given: The scale that gradient was computed with, if it may have moved on since: then the gradient
                can lower it, and no longer raise it.
        """
        if given is None or given is self.now:
            self.now = self.now.after(nonfinite)
        else:
            self.now = self.now.lower_of(given.after(nonfinite), nonfinite.device)
