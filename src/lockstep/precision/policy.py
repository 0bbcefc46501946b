"""Precision policies by name, and float32 master weights of parameters that are held in half precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.arguments import check_instance
from lockstep.errors import StateError
from lockstep.precision.finite import gradients_of
from lockstep.state import check_keys
from lockstep.strides import laid_out_for

_NO_AUTOCAST: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Precision:
    """A policy of number formats for forward and backward.

    Attributes:
        name: The name that users pass.
        autocast_dtype: The dtype in which PyTorch's autocast runs the operations that benefit from it; None to
            leave all operations, and an autocast that surrounds the update, as they are.
        held_dtype: The dtype of the parameters of the model, for which the updater holds float32 master weights;
            None if the optimizer updates the parameters themselves.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    held_dtype: torch.dtype | None = None

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Return the autocast context for one shard.

        Args:
            device_type: The type of the device of the shard, as in `torch.device.type`.
        """
        if self.autocast_dtype is None:
            return _NO_AUTOCAST
        # The cache of cast weights is disabled, because the threads of all devices would share it.
        return torch.autocast(device_type, dtype=self.autocast_dtype, cache_enabled=False)

    def check_model(self, model: nn.Module) -> None:
        """Check that a model has parameters in the dtype of the policy.

        Args:
            model: The model to check.

        Raises:
            ValueError: If the model has no parameter in that dtype.
        """
        if self.held_dtype is None or any(each.dtype == self.held_dtype for each in model.parameters()):
            return
        raise ValueError(
            f"`model` must hold parameters in {self.held_dtype} with precision={self.name!r}, got none. "
            f"Call model.to({self.held_dtype}), or use precision={self.name.removesuffix('-true')!r}."
        )


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        "fp32": Precision("fp32"),
        "bf16": Precision("bf16", autocast_dtype=torch.bfloat16),
        "fp16": Precision("fp16", autocast_dtype=torch.float16),
        "bf16-true": Precision("bf16-true", held_dtype=torch.bfloat16),
        "fp16-true": Precision("fp16-true", held_dtype=torch.float16),
    }
)
"""All policies by name."""


def parse_precision(name: str) -> Precision:
    """Return the policy with a name.

    Args:
        name: One of the keys of `PRECISIONS`.

    Raises:
        ValueError: If there is no policy with this name.
    """
    if name not in [*PRECISIONS]:  # a list has no hash
        digits = "".join(each for each in str(name) if each.isdigit())
        nearest = "bf16" if "b" in str(name) and digits == "16" else {"16": "fp16", "32": "fp32"}.get(digits)
        scaled = ", with loss_scale=DynamicLossScale(2.0**16) as GradScaler has" if nearest == "fp16" else ""
        remedy = f" Pass precision={nearest!r}{scaled}." if nearest else ""
        raise ValueError(f"`precision` must be one of {', '.join(map(repr, PRECISIONS))}, got {name!r}.{remedy}")
    return PRECISIONS[name]


HALF_PRECISION: Final = frozenset({torch.float16, torch.bfloat16})
"""The dtypes whose parameters get a master weight."""


class MasterWeights:
    """Float32 master weights for the half-precision parameters of any optimizer.

    Between steps the optimizer looks as it did before: its groups hold the parameters of the model, and its state
    is stored under them, in float32. During a step the master weights replace the parameters, each with its
    gradient in float32, so step hooks see master weights and their gradients, too.

    You may write to a parameter, for example to load a checkpoint, to clamp it, or to copy it from another replica.
    Before each step, elements of a parameter that differ from their rounded master weight replace the master weight.
    If you load a state into the optimizer itself, it is used as well, but torch rounds it to the format of the
    parameters; `load_state_dict` of this class does not round.

    Args:
        optimizer: The optimizer. Its parameters in float32 and float64 are updated as usual.

    Attributes:
        optimizer: The optimizer that updates the master weights.
        active: Whether the master weights replace the parameters at the moment.

    Raises:
        TypeError: If `optimizer` is not a `torch.optim.Optimizer`.

    Determinism: elementwise. Nothing waits for the device.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> masters = MasterWeights(torch.optim.SGD([weight], lr=2.0**-9))
    >>> for _ in range(2):
    ...     weight.grad = torch.ones_like(weight)
    ...     masters.step()
    >>> masters.of(weight), weight.detach()
    (tensor([0.9961]), tensor([0.9961], dtype=torch.bfloat16))
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        self.optimizer = optimizer
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._state: object = optimizer.state
        self.active = False
        self.refresh()

    def of(self, parameter: Tensor) -> Tensor:
        """Return the master weight of a parameter.

        Args:
            parameter: A half-precision parameter of the optimizer.

        Raises:
            KeyError: If the parameter has no master weight.
        """
        if parameter not in self._masters:
            raise KeyError(
                f"`parameter` must be a half-precision parameter of the optimizer, got one of {parameter.dtype} "
                f"and shape {tuple(parameter.shape)}."
            )
        return self._masters[parameter].detach()

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the master weights by the names of their parameters.

        Args:
            model: The model that defines the names.
        """
        return {name: self._masters[each].detach() for name, each in model.named_parameters() if each in self._masters}

    # One step --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step of the optimizer on the master weights, and round them to the parameters.

        Args:
            closure: A function that computes the loss and the gradients of the parameters. It is called once before
                the step. An optimizer that requires a closure, such as `torch.optim.LBFGS`, calls it as often as it
                needs.

        Returns:
            What the closure returned, or what the optimizer returned if there is no closure.
        """
        if closure is not None and asks_for_closure(self.optimizer):
            self.refresh()
            with self.replacing_parameters():
                return self.optimizer.step(partial(self._gradients_at_masters, closure))
        loss = None
        if closure is not None:
            # The closure is called here and not by the optimizer: in a step the model would compute gradients for the
            # parameters, while the optimizer reads those of the master weights.
            with torch.enable_grad():
                loss = closure()
        self.copy_gradients()
        with self.replacing_parameters():
            returned = self.optimizer.step()
        return returned if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the parameters.

        Args:
            set_to_none: Whether to set them to None instead of zero.
        """
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def copy_gradients(self) -> None:
        """Copy the gradient of each parameter to its master weight, in float32.

        Within `replacing_parameters` this does nothing, because the master weights have gradients already.
        """
        if self.active:
            return
        self.refresh()
        for parameter, master in self._masters.items():
            master.grad = _gradient_for(master, parameter)

    def gradient_target(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor whose ``grad`` the optimizer reads in a step: the master weight if there is one.

        Args:
            parameter: A parameter of the optimizer.
        """
        return self._masters.get(parameter, parameter)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that a step would use, after `copy_gradients`."""
        return gradients_of(self._masters.get(parameter, parameter) for parameter in parameters_of(self.optimizer))

    @contextmanager
    def replacing_parameters(self) -> Iterator[None]:
        """Return a context in which the master weights replace the parameters, which are updated at its end.

        If the block raises, the parameters are not changed, and the master weights are reset to them at the next
        step.
        """
        try:
            with self._swapped():
                yield
            self._write_back()
        finally:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients of the master weights, unless a step is in progress."""
        for master in self._masters.values() if not self.active else ():
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Create master weights for new parameters, and update the others where a parameter was written to.

        Within `replacing_parameters` this does nothing, because the optimizer holds the master weights themselves.
        """
        if self.active:
            return
        ours = list(self._in_half_precision().values())
        # Parameters that have left the optimizer must not keep their master weights.
        self._masters = {parameter: self._masters[parameter] for parameter in ours if parameter in self._masters}
        for parameter in ours:
            master = self._masters.get(parameter)
            if master is None or master.shape != parameter.shape or master.device != parameter.device:
                # Fused kernels ignore strides, so a master weight is dense and has the strides of the parameter's
                # gradients.
                values = laid_out_for(parameter, parameter.detach().float())
                self._masters[parameter] = nn.Parameter(values)
                self._cast_state(parameter, torch.float32)
            else:
                # The choice is elementwise, because a branch on the host would wait for the device.
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        # An optimizer that loads a state replaces the dictionary, and the new one is not in float32.
        if self._state is not self.optimizer.state:
            self._state = self.optimizer.state
            for parameter in self._masters:
                self._cast_state(parameter, torch.float32)

    def remove(self) -> None:
        """Remove the master weights, so that the optimizer updates the parameters, with its state in their format."""
        for parameter in self._masters:
            self._cast_state(parameter, parameter.dtype)
        self._masters.clear()

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and the master weights by the index of their parameter."""
        return {"optimizer": self.optimizer.state_dict(), "masters": self.saved_masters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Load the state of the model as well: a parameter that is not its rounded master weight replaces it.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            StateError: If something is missing, unknown or of another shape. Nothing has been changed then.
        """
        check_keys(state, ["optimizer", "masters"], of="MasterWeights")
        self.check_masters(state["masters"])
        with self.loading():
            self.optimizer.load_state_dict(state["optimizer"])
        self.load_masters(state["masters"])

    def saved_masters(self) -> dict[int, Tensor]:
        """Return the master weights by the index of their parameter among all parameters of the optimizer."""
        ours = self._in_half_precision()
        return {index: self._masters[each].detach() for index, each in ours.items() if each in self._masters}

    def check_masters(self, saved: Mapping[int, Tensor]) -> None:
        """Check that saved master weights fit the parameters of the optimizer.

        Args:
            saved: Master weights that `saved_masters` returned.

        Raises:
            StateError: If their indices or shapes are different.
        """
        here = {index: tuple(parameter.shape) for index, parameter in self._in_half_precision().items()}
        there = {index: tuple(master.shape) for index, master in saved.items()}
        if here != there:
            raise StateError(f"The master weights must have the shapes {here} by index, got {there}.")

    @torch.no_grad()
    def load_masters(self, saved: Mapping[int, Tensor]) -> None:
        """Copy saved master weights, which `check_masters` has accepted.

        Args:
            saved: Master weights that `saved_masters` returned.
        """
        self.refresh()
        for index, parameter in enumerate(parameters_of(self.optimizer)):
            if parameter in self._masters and index in saved:
                self._masters[parameter].copy_(saved[index])

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context in which the optimizer loads its state for the master weights, and thus in float32."""
        self.refresh()
        # torch casts a loaded state to the dtype of the parameters that it finds in the groups.
        with self._swapped():
            yield

    # Inside ----------------------------------------------------------------------------------

    def _in_half_precision(self) -> dict[int, Tensor]:
        """Return the parameters that need a master weight, by their index among all parameters of the optimizer."""
        found = enumerate(parameters_of(self.optimizer))
        return {index: each for index, each in found if each.dtype in HALF_PRECISION and not is_lazy(each)}

    @contextmanager
    def _swapped(self, *, active: bool = True) -> Iterator[None]:
        """Return a context in which the groups of the optimizer hold the master weights, or else the parameters."""
        masters: Mapping[Tensor, Tensor] = dict(self._masters)
        parameters: Mapping[Tensor, Tensor] = {master: parameter for parameter, master in masters.items()}
        self._replace(masters if active else parameters)
        self.active = active
        try:
            yield
        finally:
            # The tensors are searched for, because an optimizer that has loaded a state holds other groups and another
            # state.
            self.active = not active
            self._replace(parameters if active else masters)

    def _replace(self, others: Mapping[Tensor, Tensor]) -> None:
        """Replace tensors in the groups of the optimizer, and as keys of its state, in order."""
        if not others:
            return
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = others.get(old, old)
                group["params"][index] = new
                # Every entry is moved, replaced or not, so that the order of the state stays that of the groups. Asked
                # as a dict: a state that is shared out over ranks is empty, and refuses to be read by others.
                if dict.__contains__(state, old):
                    state[new] = state.pop(old)

    def _gradients_at_masters(self, closure: Callable[[], Any]) -> Any:
        """Call a closure with the parameters at the current master weights, and copy the gradients to these."""
        self._write_back()
        # The closure may call `zero_grad`, which must find the parameters in the groups.
        with self._swapped(active=False):
            loss = closure()
        for parameter, master in self._masters.items():
            master.grad = _gradient_for(master, parameter)
        return loss

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round the master weights to the parameters; where all are of one device and dtype, with one kernel."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    def _cast_state(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Convert the elementwise state of a parameter to another dtype."""
        state: dict[str, Any] = dict.get(self.optimizer.state, parameter, {})
        for key, value in state.items():
            # torch's optimizers count steps in a tensor, which has the shape of a 0-d parameter.
            if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = laid_out_for(parameter, value.to(dtype)) if value.is_floating_point() else value


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in all groups of an optimizer.

    Args:
        optimizer: The optimizer.
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient_for(master: Tensor, parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter in float32."""
    # Fused kernels ignore strides, so the gradient gets those of the master weight.
    return None if parameter.grad is None else laid_out_for(master, parameter.grad.float())


def asks_for_closure(optimizer: Optimizer) -> bool:
    """Return whether a step of an optimizer requires a closure that computes the gradients.

    Args:
        optimizer: The optimizer.
    """
    return "closure" in required_by_step(optimizer)


def required_by_step(optimizer: Optimizer) -> list[str]:
    """Return the names of the arguments without a default of an optimizer's step.

    Args:
        optimizer: The optimizer.
    """
    arguments = [*inspect.signature(type(optimizer).step).parameters.values()][1:]
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [each.name for each in arguments if each.default is each.empty and each.kind not in variadic]
