"""Scale the loss in a loop of one's own, with the scale and every decision on the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep import nest
from lockstep.errors import OrderError, StateError
from lockstep.precision.finite import gradients_of, nonfinite_flag, sent, unscale_
from lockstep.precision.leaving_out import cannot_skip, left_out_if
from lockstep.precision.masters import HALF_PRECISION, MasterWeights, parameters_of
from lockstep.precision.moving import MovingScale
from lockstep.precision.scales import DynamicLossScale, LossScale, parse_loss_scale
from lockstep.state import check_keys


class HasMasters:
    """What an optimizer inherits from that may hold master weights of its own."""

    @property
    def masters(self) -> MasterWeights | None:
        """The masters, or None."""
        return None


Steppable: TypeAlias = Optimizer | MasterWeights

Losses = TypeVar("Losses")
"""A tensor, or a nest of them."""


@dataclass(slots=True)
class _Checked:
    """An optimizer whose gradients were divided since the last update of the scale.

    Attributes:
        optimizer: Kept, so that no other gets its ``id``.
        nonfinite: 1 if one of them was not finite, else 0; on the device of the scale.
        masters: What holds the divided gradients, if not the parameters.
        stepped: Whether the step was taken, or left out for the flag.
    """

    optimizer: Steppable
    nonfinite: Tensor
    masters: MasterWeights | None
    stepped: bool = False


class LossScaler:
    """Scale the loss, divide the gradients, step if they are finite, and choose the next scale.

    In the loop that users of ``torch.amp.GradScaler`` know::

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    The order is: divide, check, step hooks, step, next scale. So whatever hook the optimizer has sees true
    gradients. To see them between backward and step, call `unscale_` there.

    Factor, flag and decision are tensors on the device. With an optimizer that can leave its step out by a
    flag on the device (`skips_on_device`) nothing waits for it; with others `step` reads the flag. An update
    that is left out changes nothing but the scale.

    Args:
        scale: A `LossScale`, a number for a static one, or None for 1; by default dynamic. A gradient that
            is not finite is left out whatever the scale.

    Raises:
        TypeError: `scale` is none of these.
        ValueError: It is a number and not positive and finite.

    Determinism: elementwise; a power of two as factor changes no bit of a gradient that neither overflows
    nor underflows.

    References: Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.2. The
    calls are those of ``torch.amp.GradScaler``.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = LossScaler(DynamicLossScale(factor=8.0))
    >>> for x in (1.0, float("inf")):
    ...     optimizer.zero_grad()
    ...     scaler.scale((weight * x).sum()).backward()
    ...     scaler.step(optimizer)
    ...     scaler.update()
    >>> weight.item(), scaler.factor
    (0.5, 4.0)
    """

    def __init__(self, scale: LossScale | float | None = None) -> None:
        self._scale = MovingScale(DynamicLossScale() if scale is None else parse_loss_scale(scale))
        self._device = torch.device("cpu")
        self._formats: set[torch.dtype] = set()
        self._checked: dict[int, _Checked] = {}

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the next loss as a value; reading it waits for the device."""
        return self._scale.value

    @property
    def factor(self) -> float:
        """What the next loss is multiplied by; reading it waits for the device."""
        return self.loss_scale.factor

    @staticmethod
    def skips_on_device(optimizer: Steppable) -> bool:
        """Tell whether `step` can leave the optimizer's step out without reading the flag.

        True of torch's fused optimizers, unless a hook of their step does more than change gradients. Not of
        the first step of a fused SGD with momentum: left out on the device, it would leave the new velocities
        uninitialised, and those move the weights afterwards.
        """
        return cannot_skip(_inner(optimizer), _masters_of(optimizer)) is None

    def scale(self, loss: Losses) -> Losses:
        """Multiply a loss by the factor, in float32 at least, on the loss's device.

        A loss in half precision hands backward the factor rounded to its format, by which gradients are then
        divided. Where losses of several formats are scaled between two calls of `update`, they are divided by
        the factor itself, so let it be a power of two there.

        Args:
            loss: Left untouched; any shape. Or several, in tuples, lists and dicts.

        Returns:
            The product, in containers like those given.

        Raises:
            TypeError: There is no tensor in it.
        """
        if not nest.tensors(loss):
            raise TypeError(f"`loss` must be a tensor, or hold some, got a {type(loss).__name__} without.")
        return cast("Losses", nest.map_tensors(self._scaled, loss))

    def _scaled(self, loss: Tensor) -> Tensor:
        self._device = loss.device
        self._formats.add(loss.dtype)
        wide = loss.float() if loss.dtype in HALF_PRECISION else loss
        return wide * self._scale.factor_on(loss.device).to(wide.dtype)

    def unscale_(self, optimizer: Steppable) -> None:
        """Divide an optimizer's gradients by the factor and check them, ahead of `step`.

        Gradients of masters are those in the masters' ``grad``.

        Raises:
            OrderError: They were divided already since the last `update`.
        """
        if id(optimizer) in self._checked:
            raise OrderError(
                "`unscale_` must be called at most once, and before `step`, between two calls of `update`."
            )
        masters = _masters_of(optimizer)
        if masters is None:
            gradients = gradients_of(parameters_of(_inner(optimizer)))
        else:
            masters.take_gradients()
            gradients = masters.gradients()
        nonfinite = unscale_(gradients, self._divisor())
        self._checked[id(optimizer)] = _Checked(optimizer, nonfinite, masters)

    def nonfinite(self, optimizer: Steppable) -> Tensor:
        """Tell whether an optimizer's gradients are finite: 0 if so, else 1, on the device.

        After `unscale_` it is the divided gradients that count, else those that are there, which stay as
        they are.
        """
        checked = self._checked.get(id(optimizer))
        if checked is not None:
            return checked.nonfinite
        return nonfinite_flag(gradients_of(parameters_of(_inner(optimizer))), self._device)

    def step(self, optimizer: Steppable) -> Any:
        """Step the optimizer if its gradients are finite, dividing them first if `unscale_` has not.

        Returns:
            What the optimizer's step returned, or None where the step was left out.

        Raises:
            OrderError: It was called already since the last `update`.
        """
        if id(optimizer) not in self._checked:
            self.unscale_(optimizer)
        checked = self._checked[id(optimizer)]
        if checked.stepped:
            raise OrderError("`step` must be called once for each optimizer between two calls of `update`.")
        checked.stepped = True
        inner = _inner(optimizer)
        on_device = cannot_skip(inner, checked.masters) is None
        if not on_device and bool(checked.nonfinite):
            if checked.masters is not None:
                checked.masters.drop_gradients()
            return None
        with (
            left_out_if(inner, checked.nonfinite) if on_device else nullcontext(),
            nullcontext() if checked.masters is None else checked.masters.in_place(),
        ):
            return inner.step()

    def update(self, *, nonfinite: Tensor | None = None) -> None:
        """Choose the scale of the next loss; down if any optimizer's gradients were not finite.

        Args:
            nonfinite: Decides in the place of what `step` and `unscale_` found: 0-d, above 0 for down.

        Raises:
            OrderError: No gradients were checked since the last call.
        """
        if nonfinite is None:
            if not self._checked:
                raise OrderError("`update` must follow `step` or `unscale_`, once for each time.")
            flags = [checked.nonfinite for checked in self._checked.values()]
            nonfinite = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        self._scale = self._scale.after(sent(nonfinite, self._device))
        for checked in self._checked.values():
            if checked.masters is not None:
                checked.masters.drop_gradients()
        self._checked.clear()
        self._formats.clear()

    def state_dict(self) -> dict[str, Any]:
        """Give the scale's class and fields; waits for the device."""
        scale = self.loss_scale
        return {"policy": type(scale).__name__, "scale": scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved scale.

        Raises:
            StateError: Keys are missing or unknown, or it is of another class of scale.
        """
        self._scale = MovingScale(self.restored(state))
        self._checked.clear()

    def restored(self, state: Mapping[str, Any]) -> LossScale:
        """Read a saved scale and change nothing.

        Raises:
            StateError: Keys are missing or unknown, or it is of another class of scale.
        """
        check_keys(state, ["policy", "scale"], of="a LossScaler")
        name = type(self.loss_scale).__name__
        if state["policy"] != name:
            raise StateError(f"The state of a LossScaler must be of a {name}, got {state['policy']!r}.")
        return self.loss_scale.restored(state["scale"])

    def _divisor(self) -> float | Tensor:
        """Give what gradients are divided by: as a number where looking is free, which saves a pass."""
        factor = self._scale.factor_on(self._device)
        if len(self._formats) == 1 and self._formats <= HALF_PRECISION:
            factor = factor.to(next(iter(self._formats))).double()
        return factor.item() if self._device.type == "cpu" else factor


def _masters_of(optimizer: Steppable) -> MasterWeights | None:
    if isinstance(optimizer, MasterWeights):
        return optimizer
    return optimizer.masters if isinstance(optimizer, HasMasters) else None


def _inner(optimizer: Steppable) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
