"""A complete training step in half precision: an optimizer with a loss scale and float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lockstep.errors import StateError
from lockstep.precision import HasMasters, LossScale, LossScaler, MasterWeights, RampLossScale


class ScaledOptimizer(Optimizer, HasMasters):
    """An optimizer that can scale the loss and update float32 master weights.

    `update` is a complete training step on one device: it scales the loss, runs backward, divides the gradients
    by the scale, calls `step` if they are all finite, and updates the scale. `loss_scaling` and
    `use_fp32_update` enable what half precision needs; `lockstep.precision` does the work. A subclass implements
    `step`, which must update the master weights where they exist and are not in place already.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._scaler: LossScaler | None = None
        self._masters: MasterWeights | None = None
        super().__init__(params, defaults)

    def update(self, loss_fn: Callable[..., Tensor] | None = None, *args: Any, **kwargs: Any) -> Tensor | None:
        """Run a complete training step on one device.

        In this order: clear the gradients, compute ``loss_fn(*args, **kwargs)``, run backward from the loss times
        the loss scale, divide by the scale, check the gradients, call `step`, and update the scale. If a gradient
        is not finite, only the scale changes: no hook is called, no weight moves and nothing is counted. Without
        a loss scale there is no check, as in any training loop.

        Args:
            loss_fn: A function that returns the unscaled loss. Without it the existing gradients are used, which
                must be those of the loss times the scale.
            *args: The positional arguments of ``loss_fn``.
            **kwargs: The keyword arguments of ``loss_fn``.

        Returns:
            The loss, or None without ``loss_fn``.
        """
        loss = None
        if loss_fn is not None:
            self.zero_grad()
            with torch.enable_grad():
                loss = loss_fn(*args, **kwargs)
                scaled = loss if self._scaler is None else self._scaler.scale(loss)
                scaled.backward()  # type: ignore[no-untyped-call]  # torch's gap
        if self._scaler is None:
            self.step()
        else:
            self._scaler.step(self)
            self._scaler.update()
        # Detached, because a loss that you keep would keep its graph in memory.
        return None if loss is None else loss.detach()

    def loss_scaling(self, interval: float = 1000, scale: LossScale | float | None = None) -> None:
        """Enable loss scaling in `update`.

        Args:
            interval: The number of finite updates in which Chainer's scale doubles after its first overflow; at
                least 1.
            scale: A `LossScale`, or a number for a static scale, to use instead of Chainer's.

        Raises:
            TypeError: If ``scale`` is neither of these.
            ValueError: If a number is out of range.
        """
        self._scaler = LossScaler(RampLossScale(interval=interval) if scale is None else scale)

    def set_loss_scale(self, loss_scale: float) -> None:
        """Enable loss scaling in `update` with a constant scale.

        Args:
            loss_scale: The scale, positive and finite.

        Raises:
            ValueError: If the scale is not positive and finite.
        """
        self.loss_scaling(scale=loss_scale)

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the next loss, or None without `loss_scaling`. Reading it synchronizes with the device."""
        return None if self._scaler is None else self._scaler.loss_scale

    def update_loss_scale(self) -> None:
        """Update the scale from the current gradients; `update` calls this itself.

        Without a loss scale it has no effect.
        """
        if self._scaler is not None:
            self._scaler.update(nonfinite=self._scaler.nonfinite(self))

    def is_safe_to_update(self) -> bool:
        """Return whether the current gradients are finite; synchronizes with the device."""
        scaler = LossScaler(1.0) if self._scaler is None else self._scaler
        return not bool(scaler.nonfinite(self))

    def use_fp32_update(self, flag: bool = True) -> None:
        """Update float32 master weights of half-precision parameters, and round them to the parameters.

        The master weights start as copies of the parameters, and follow changes that you make to these.

        Args:
            flag: Whether to use master weights; False discards them and updates the parameters themselves.
        """
        if flag and self._masters is None:
            self._masters = MasterWeights(self)
        elif not flag and self._masters is not None:
            self._masters.remove()
            self._masters = None

    @property
    def masters(self) -> MasterWeights | None:
        """The float32 master weights, or None without `use_fp32_update`."""
        return self._masters

    def _check_precision(self, saved: Mapping[str, Any]) -> None:
        """Check that a saved state has a loss scale and master weights exactly where this optimizer has them."""
        here = {"loss_scale": self._scaler is not None, "masters": self._masters is not None}
        there = {key: saved[key] is not None for key in here}
        if here != there:
            raise StateError(
                f"The optimizer must have a loss scale and master weights as the saved state has ({there}), "
                f"got {here}. Call `loss_scaling` or `use_fp32_update` before loading."
            )
        # Both calls only check: a state is loaded after all of it was found to fit.
        if self._scaler is not None:
            self._scaler.restored(saved["loss_scale"])
        if self._masters is not None:
            self._masters.check_masters(saved["masters"])
