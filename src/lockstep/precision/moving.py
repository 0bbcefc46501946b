"""A loss scale on its way: its numbers are on the host or on a device, and move there without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.precision.finite import sent
from lockstep.precision.scales import LossScale


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
        self._scale = scale
        self._moving: dict[str, Tensor] = {}
        self._factor: Tensor | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether no gradient moves it, so that its value is known without looking."""
        return not self._scale.moving

    @property
    def value(self) -> LossScale:
        """The scale as a value, the same object until it changes; waits for the device if it is there."""
        if self._moving:
            self.value = self._scale.with_moving(self._moving)
        return self._scale

    @value.setter
    def value(self, scale: LossScale) -> None:
        self._scale, self._moving, self._factor = scale, {}, None

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

    def follow(self, nonfinite: Tensor) -> None:
        """Choose the next scale, on the device of the flag; nothing waits for it.

        Args:
            nonfinite: 0-d; above 0 after a gradient that was not finite.
        """
        factor = self.factor_on(nonfinite.device)
        self._moving = self._scale.after_on_device(self._moving, nonfinite)
        self._factor = self._moving.get("factor", factor)
