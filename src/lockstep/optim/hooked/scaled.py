"""A training step in half precision: an optimizer with a loss scale and float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lockstep.errors import StateError
from lockstep.precision import HasMasters, LossScale, LossScaler, MasterWeights, RampLossScale


class ScaledOptimizer(Optimizer, HasMasters):
    """An optimizer that may scale the loss and move float32 masters; without either it is as any other.

    `update` is a whole training step on one device: the loss times the loss scale, backward, the division
    by the scale, `step` if all gradients are finite, the next scale. `loss_scaling` and `use_fp32_update`
    turn on what half precision needs; `lockstep.precision` does the work. A subclass writes `step`, which
    moves the masters where they are there and not in place already.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._scaler: LossScaler | None = None
        self._masters: MasterWeights | None = None
        super().__init__(params, defaults)

    def update(self, loss_fn: Callable[..., Tensor] | None = None, *args: Any, **kwargs: Any) -> Tensor | None:
        """Do a whole training step on one device.

        In this order: clear the gradients, ``loss_fn(*args, **kwargs)``, backward from the loss times the
        loss scale, division by the scale, check, `step`, the next scale. Gradients that are not finite
        change nothing but the scale: no hook is called, nothing moves, nothing is counted. Without a loss
        scale there is no check, as in any loop.

        Args:
            loss_fn: Returns the loss, not scaled. Without it the gradients that are there are used, which
                must be of the loss times the scale.
            *args: Given to ``loss_fn``.
            **kwargs: Given to ``loss_fn``.

        Returns:
            The loss, if there is a function for it.
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
        return None if loss is None else loss.detach()

    def loss_scaling(self, interval: float = 1000, scale: LossScale | float | None = None) -> None:
        """Have `update` scale the loss.

        Args:
            interval: Finite updates it takes Chainer's scale to double after its first overflow; at least 1.
            scale: A `LossScale`, or a number for a static one, in the place of Chainer's.

        Raises:
            TypeError: ``scale`` is none of these.
            ValueError: A number is out of range.
        """
        self._scaler = LossScaler(RampLossScale(interval=interval) if scale is None else scale)

    def set_loss_scale(self, loss_scale: float) -> None:
        """Have `update` scale the loss by a number that stays.

        Args:
            loss_scale: Positive and finite.

        Raises:
            ValueError: It is not.
        """
        self.loss_scaling(scale=loss_scale)

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the next loss; None without `loss_scaling`. Reading it waits for the device."""
        return None if self._scaler is None else self._scaler.loss_scale

    def update_loss_scale(self) -> None:
        """Choose the next scale by the gradients that are there; `update` does so itself.

        Without a loss scale there is nothing to choose.
        """
        if self._scaler is not None:
            self._scaler.update(nonfinite=self._scaler.nonfinite(self))

    def is_safe_to_update(self) -> bool:
        """Tell whether the gradients that are there are finite; waits for the device."""
        scaler = LossScaler(1.0) if self._scaler is None else self._scaler
        return not bool(scaler.nonfinite(self))

    def use_fp32_update(self, flag: bool = True) -> None:
        """Move float32 masters of parameters in half precision, and round them into the parameters.

        Masters begin as the parameters are and follow what is written to these from outside.

        Args:
            flag: False goes back to moving the parameters themselves, and forgets the masters.
        """
        if flag and self._masters is None:
            self._masters = MasterWeights(self)
        elif not flag and self._masters is not None:
            self._masters.dissolve()
            self._masters = None

    @property
    def masters(self) -> MasterWeights | None:
        """The float32 masters; None without `use_fp32_update`."""
        return self._masters

    def _check_precision(self, saved: Mapping[str, Any]) -> None:
        """Refuse a loss scale or masters where there are none here, and the other way round."""
        here = {"loss_scale": self._scaler is not None, "masters": self._masters is not None}
        there = {key: saved[key] is not None for key in here}
        if here != there:
            raise StateError(
                f"The optimizer must have a loss scale and masters as the saved state has ({there}), "
                f"got {here}. Call `loss_scaling` or `use_fp32_update` before loading."
            )
        if self._scaler is not None:
            self._scaler.restored(saved["loss_scale"])
        if self._masters is not None:
            self._masters.check_masters(saved["masters"])
