"""A loss scale whose numbers may be on the host or on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.precision.finite import to_device
from lockstep.precision.scales import LossScale


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
