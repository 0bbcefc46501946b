"""Scale losses and step optimizers in loops of your own; a step that is not finite is skipped on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep import nest
from lockstep.errors import OrderError, StateError, warn
from lockstep.precision.finite import gradients_of, nonfinite_flag, to_device, unscale_
from lockstep.precision.policy import HALF_PRECISION, PRECISIONS, MasterWeights, Precision, parameters_of
from lockstep.precision.scales import CurrentScale, DynamicLossScale, LossScale, parse_loss_scale
from lockstep.state import check_keys


class ChangesOnlyGradients:
    """The base class of step hooks that change gradients and nothing else.

    Such a hook stores nothing, draws no random numbers and writes nothing. It therefore does no harm before a step
    that is skipped on the device, where the host does not know whether the step was skipped.
    """


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """List what PyTorch calls before and after the steps of an optimizer.

    Args:
        optimizer: The optimizer.
    """
    return [
        *_global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]


def cannot_skip(optimizer: Optimizer, masters: MasterWeights | None = None) -> str | None:
    """Return why the next step of an optimizer cannot be skipped by a flag on the device; None if it can.

    Args:
        optimizer: The optimizer. Its gradients must have been computed.
        masters: The master weights that the optimizer updates, if any. They may hold the gradients.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> cannot_skip(torch.optim.AdamW([weight], fused=True))
    >>> cannot_skip(torch.optim.AdamW([weight]))
    "AdamW takes no flag; torch's fused optimizers (fused=True) do"
    """
    name = type(optimizer).__name__
    if not vars(optimizer).get("_step_supports_amp_scaling", False):
        if isinstance(optimizer, Adagrad) and any(group["fused"] for group in optimizer.param_groups):
            return f"the fused Adagrad of torch {torch.__version__} takes no flag"
        return f"{name} takes no flag; torch's fused optimizers (fused=True) do"
    # Hooks run on the host, in skipped steps as well.
    if not all(isinstance(hook, ChangesOnlyGradients) for hook in step_hooks(optimizer)):
        return f"{name} has a hook of its step that may do more than change gradients"
    if isinstance(optimizer, SGD) and _lacks_velocity(optimizer, masters):
        # Skipped on the device, the step would leave the velocities uninitialized, and later steps would use them.
        return f"the first step of {name} with momentum creates its velocities"
    return None


@contextmanager
def skipped_if(optimizer: Optimizer, nonfinite: Tensor) -> Iterator[None]:
    """Return a context in which steps of an optimizer change nothing if a flag on the device is above 0.

    Args:
        optimizer: The optimizer, for which `cannot_skip` must return None.
        nonfinite: The flag: 0-d, float32.
    """
    # torch's fused kernels read the flag from these attributes.
    attributes: dict[str, Any] = vars(optimizer)
    attributes["found_inf"], attributes["grad_scale"] = nonfinite, None
    try:
        yield
    finally:
        # The next step may be a plain one, and must not be skipped by an old flag.
        del attributes["found_inf"], attributes["grad_scale"]


def _lacks_velocity(optimizer: SGD, masters: MasterWeights | None) -> bool:
    """Return whether the next step would create a velocity."""
    return any(
        dict.get(optimizer.state, parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None or (masters and masters.gradient_target(parameter).grad is not None)
    )


Steppable: TypeAlias = Optimizer | MasterWeights
"""What `LossScaler` can step."""

Losses = TypeVar("Losses")
"""A tensor, or tensors nested in tuples, lists and dicts."""


@dataclass(slots=True)
class _CheckedOptimizer:
    """An optimizer whose gradients have been divided since the last update of the scale.

    Attributes:
        optimizer: The optimizer. It is held so that no other object can get its ``id``.
        nonfinite: A flag that is 1 if a gradient was not finite, else 0, on the device of the scale.
        masters: The master weights that hold the divided gradients; None if the parameters hold them.
        stepped: Whether `step` has been called, even if the step was skipped.
    """

    optimizer: Steppable
    nonfinite: Tensor
    masters: MasterWeights | None
    stepped: bool = False


class LossScaler:
    """Scales losses, divides gradients, steps if they are finite, and adjusts the scale.

    It is used like ``torch.amp.GradScaler``::

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    The order is: divide, check, step hooks, step, next scale. Step hooks of the optimizer therefore see the true
    gradients. To see them between backward and step, call `unscale_` there.

    The factor, the flags and the decisions are tensors on the device. With an optimizer that can skip its step by a
    flag on the device (see `skips_on_device`) nothing waits for the device; with others `step` reads the flag. A
    skipped step changes nothing but the scale.

    Args:
        scale: A `LossScale`, or a number for a static one; by default a `DynamicLossScale`. Whatever the scale, a
            step is skipped if a gradient is not finite.
        enabled: Whether anything is scaled and checked. If False, `scale` returns the loss itself, `step` runs the step
            of the optimizer, and the other methods do nothing.

    Raises:
        TypeError: If `scale` is not one of these.
        ValueError: If `scale` is a number that is not positive and finite.

    Determinism: elementwise; a power of two as factor changes no bit of a gradient that neither overflows
    nor underflows.

    References: Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.2. The
    interface is that of ``torch.amp.GradScaler``.

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

    def __init__(self, scale: LossScale | float | None = None, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._scale = CurrentScale(DynamicLossScale() if scale is None else parse_loss_scale(scale))
        self._device = torch.device("cpu")
        self._formats: set[torch.dtype] = set()
        self._checked: dict[int, _CheckedOptimizer] = {}

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the next loss as a value. Reading it waits for the device."""
        return self._scale.value

    @property
    def factor(self) -> float:
        """The factor of the next loss, 1 if the scaler is not enabled. Reading it waits for the device."""
        return self.loss_scale.factor if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether anything is scaled and checked."""
        return self._enabled

    @staticmethod
    def skips_on_device(optimizer: Steppable) -> bool:
        """Return whether `step` can skip the step of an optimizer without reading the flag.

        That is so for torch's fused optimizers, unless a hook of their step does more than change gradients. An
        exception is the first step of a fused SGD with momentum: skipped on the device, it would leave the new
        velocities uninitialized, and later steps would use them.

        Args:
            optimizer: The optimizer.
        """
        return cannot_skip(_inner(optimizer), _masters_of(optimizer)) is None

    def scale(self, loss: Losses) -> Losses:
        """Multiply a loss by the factor, in at least float32 and on the device of the loss.

        Backward of a loss in half precision starts with the factor rounded to its format, and gradients are then
        divided by the rounded factor. If you scale losses of several formats between two calls of `update`, the
        gradients are divided by the factor itself. Use a power of two in this case.

        Args:
            loss: A tensor of any shape, or several in tuples, lists and dicts. It is not changed.

        Returns:
            The product, in the same containers.

        Raises:
            TypeError: If `loss` holds no tensor.
        """
        if not self._enabled:
            return loss
        if not nest.tensors(loss):
            raise TypeError(f"`loss` must be a tensor or hold tensors, got a {type(loss).__name__} without tensors.")
        return cast("Losses", nest.map_tensors(self._scaled, loss))

    def _scaled(self, loss: Tensor) -> Tensor:
        """Multiply one tensor by the factor, and store its device and format for the division."""
        self._device = loss.device
        self._formats.add(loss.dtype)
        # The product may be too large for half precision although the gradients are not, so it is computed in float32.
        wide = loss.float() if loss.dtype in HALF_PRECISION else loss
        return wide * self._scale.factor_on(loss.device).to(wide.dtype)

    def unscale_(self, optimizer: Steppable) -> None:
        """Divide the gradients of an optimizer by the factor and check them, before `step`.

        Args:
            optimizer: The optimizer. With master weights, the divided gradients are in the ``grad`` of these.

        Raises:
            OrderError: If the gradients have been divided since the last call of `update`.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._checked:
            raise OrderError("`unscale_` must be called at most once, before `step`, between two calls of `update`.")
        masters = _masters_of(optimizer)
        if masters is None:
            gradients = gradients_of(parameters_of(_inner(optimizer)))
        else:
            # The division is in float32: in half precision it would lose the small gradients that the scale has saved.
            masters.copy_gradients()
            gradients = masters.gradients()
        nonfinite = unscale_(gradients, self._divisor())
        self._checked[id(optimizer)] = _CheckedOptimizer(optimizer, nonfinite, masters)

    def nonfinite(self, optimizer: Steppable) -> Tensor:
        """Return a flag that is 1 if a gradient of an optimizer is not finite, else 0, on the device.

        After `unscale_` the flag is that of the divided gradients. Before, it is that of the current gradients,
        which are not changed.

        Args:
            optimizer: The optimizer.
        """
        checked = self._checked.get(id(optimizer))
        if checked is not None:
            return checked.nonfinite
        return nonfinite_flag(gradients_of(parameters_of(_inner(optimizer))), self._device)

    def step(self, optimizer: Steppable, *args: Any, **kwargs: Any) -> Any:
        """Run a step of an optimizer if its gradients are finite, after dividing them unless `unscale_` has.

        Args:
            optimizer: The optimizer.
            *args: Further arguments of the step of the optimizer.
            **kwargs: Further keyword arguments of the step, except a closure.

        Returns:
            What the step of the optimizer returned, or None if the step was skipped.

        Raises:
            ValueError: If a closure is given, whose gradients would be neither divided nor checked.
            OrderError: If `step` has been called for this optimizer since the last call of `update`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is not None:
            raise ValueError(
                "`closure` must not be given to a scaler that is enabled, which divides and checks the gradients "
                "before the step. Compute them before, or pass LossScaler(enabled=False)."
            )
        if id(optimizer) not in self._checked:
            self.unscale_(optimizer)
        checked = self._checked[id(optimizer)]
        if checked.stepped:
            raise OrderError("`step` must be called once for each optimizer between two calls of `update`.")
        checked.stepped = True
        inner = _inner(optimizer)
        on_device = cannot_skip(inner, checked.masters) is None
        # Reading the flag waits for the device, so it is read only if the optimizer cannot use it there.
        if not on_device and bool(checked.nonfinite):
            if checked.masters is not None:
                checked.masters.drop_gradients()
            return None
        with (
            skipped_if(inner, checked.nonfinite) if on_device else nullcontext(),
            nullcontext() if checked.masters is None else checked.masters.replacing_parameters(),
        ):
            return inner.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None, *, nonfinite: Tensor | None = None) -> None:
        """Adjust the scale for the next loss; it is lowered if a gradient of any optimizer was not finite.

        Args:
            new_scale: The factor to set instead, a number or a tensor of one element. What else the scale counts, such
                as finite steps, stays. Reading the scale waits for the device.
            nonfinite: A flag to use instead of those that `step` and `unscale_` found: 0-d, above 0 to lower the
                scale.

        Raises:
            OrderError: If no gradients have been checked since the last call, and there is no argument.
            ValueError: If `new_scale` is out of range.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = CurrentScale(replace(self.loss_scale, factor=float(new_scale)))
        else:
            if nonfinite is None:
                if not self._checked:
                    raise OrderError("`update` must follow `step` or `unscale_`, and be called once after them.")
                flags = [checked.nonfinite for checked in self._checked.values()]
                nonfinite = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
            self._scale = self._scale.after(to_device(nonfinite, self._device))
        for checked in self._checked.values():
            if checked.masters is not None:
                checked.masters.drop_gradients()
        self._checked.clear()
        self._formats.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the class and the fields of the scale, after waiting for the device; nothing if not enabled."""
        if not self._enabled:
            return {}
        scale = self.loss_scale
        return {"policy": type(scale).__name__, "scale": scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved scale.

        Args:
            state: A state that `state_dict` returned. It is ignored if the scaler is not enabled.

        Raises:
            StateError: If keys are missing or unknown, or the state is that of another class of scale.
        """
        if not self._enabled:
            return
        self._scale = CurrentScale(self.restored(state))
        self._checked.clear()

    def restored(self, state: Mapping[str, Any]) -> LossScale:
        """Return a saved scale without loading it.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            StateError: If keys are missing or unknown, or the state is that of another class of scale.
        """
        check_keys(state, ["policy", "scale"], of="a LossScaler")
        name = type(self.loss_scale).__name__
        if state["policy"] != name:
            raise StateError(f"The state of this LossScaler must be that of a {name}, got {state['policy']!r}.")
        return self.loss_scale.restored(state["scale"])

    def _divisor(self) -> float | Tensor:
        """Return the number that gradients are divided by."""
        factor = self._scale.factor_on(self._device)
        if len(self._formats) == 1 and self._formats <= HALF_PRECISION:
            # Backward started with the rounded factor: the gradient of the product was cast to the loss's format.
            factor = factor.to(next(iter(self._formats))).double()
        # Reading a tensor on a CPU does not wait, and division by a number can be checked in the same pass.
        return factor.item() if self._device.type == "cpu" else factor


def _masters_of(optimizer: Steppable) -> MasterWeights | None:
    masters = optimizer if isinstance(optimizer, MasterWeights) else getattr(optimizer, "masters", None)
    return masters if isinstance(masters, MasterWeights) else None


def warn_of_half(policy: Precision, optimizers: Iterable[Optimizer]) -> None:
    """Warn of weights in half precision that are stepped as they are, where small changes are rounded away.

    Optimizers of other libraries may know how to step them.

    Args:
        policy: The precision of the run.
        optimizers: The optimizers.
    """
    for optimizer in optimizers if policy.held_dtype is None else ():
        held = {each.dtype for each in parameters_of(optimizer) if each.requires_grad} & HALF_PRECISION
        is_known = type(optimizer).__module__.startswith(("torch.", "lockstep."))
        if held and is_known and _masters_of(optimizer) is None:
            dtype = min(held, key=str)
            name = next(each.name for each in PRECISIONS.values() if each.held_dtype == dtype)
            warn(
                f"`model` holds weights in {dtype}, where small steps are rounded away with precision={policy.name!r}. "
                f"Pass precision={name!r}, which keeps float32 master weights, and data in that format; or call "
                "model.float() before the optimizer is created."
            )


def _inner(optimizer: Steppable) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
