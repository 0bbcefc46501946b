"""Float32 masters: what an optimizer moves in the place of parameters held in half precision.

A step of 1e-4 of a weight is lost in bfloat16, which keeps 8 bits, and in float16, which keeps 11. So the
optimizer moves a float32 copy, the master, and the parameter is the master rounded to its own format.

References: Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.errors import StateError
from lockstep.precision.finite import gradients_of
from lockstep.state import check_keys
from lockstep.strides import laid_out_for

HALF_PRECISION: Final = frozenset({torch.float16, torch.bfloat16})


class MasterWeights:
    """Let any optimizer move float32 masters of its half-precision parameters.

    Between steps the optimizer looks as it always did: its groups hold the model's parameters, and what it
    remembers for them is found under them, in float32. For the length of a step the masters stand in
    their place, each with the float32 gradient, so that step hooks see masters and their gradients too.

    A write to a parameter from outside (a loaded checkpoint, a clamp, a copy from another replica) is
    followed: before each step, elements of the parameter that are not their master rounded replace it. So is
    a state that the optimizer itself has loaded, which torch rounds to the parameters' format on the way;
    `load_state_dict` here does not round it.

    Args:
        optimizer: Anything with ``param_groups`` and ``state`` in torch's form. Parameters of float32 and
            float64 are moved as ever.

    Raises:
        TypeError: It is no optimizer.

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
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
        self._optimizer = optimizer
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._state: object = optimizer.state
        self._active = False
        self.refresh()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that moves them."""
        return self._optimizer

    @property
    def active(self) -> bool:
        """Whether the masters are in the place of the parameters just now."""
        return self._active

    def of(self, parameter: Tensor) -> Tensor:
        """Give a parameter's master.

        Raises:
            KeyError: It has none: it is not in half precision, or not the optimizer's.
        """
        if parameter not in self._masters:
            raise KeyError(
                f"`parameter` must be one of the optimizer's in half precision, got one of {parameter.dtype} "
                f"and shape {tuple(parameter.shape)}."
            )
        return self._masters[parameter].detach()

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """Give the masters by the names that a model has for their parameters."""
        return {
            name: self._masters[parameter].detach()
            for name, parameter in model.named_parameters()
            if parameter in self._masters
        }

    # One step --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the optimizer's step on the masters, and round them into the parameters.

        Args:
            closure: Computes the loss and the parameters' gradients; called once, before. An optimizer that
                asks for one, as `torch.optim.LBFGS` does, calls it as often as it likes.

        Returns:
            What the closure or else the optimizer returned.
        """
        if closure is not None and asks_for_closure(self._optimizer):
            self.refresh()
            with self.in_place():
                return self._optimizer.step(partial(self._gradients_at_masters, closure))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_gradients()
        with self.in_place():
            returned = self._optimizer.step()
        return returned if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the parameters' gradients."""
        self._optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give each master its parameter's gradient in float32; the parameter keeps its own.

        Within `in_place` there is nothing to do: the masters have theirs.
        """
        if self._active:
            return
        self.refresh()
        for parameter, master in self._masters.items():
            master.grad = _gradient_for(master, parameter)

    def receiver(self, parameter: nn.Parameter) -> nn.Parameter:
        """Say whose ``grad`` a step within `in_place` reads: that of the master, if there is one."""
        return self._masters.get(parameter, parameter)

    def gradients(self) -> list[Tensor]:
        """List the gradients that a step would use: of masters, where there are, after `take_gradients`."""
        return gradients_of(self._masters.get(parameter, parameter) for parameter in parameters_of(self._optimizer))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the masters in the place of the parameters, and round them into these at the end.

        Where the block raises, the parameters stay as they are; masters follow them back at the next step.
        """
        try:
            with self._swapped():
                yield
            self._write_back()
        finally:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Let go of what `take_gradients` took, unless a step is under way."""
        for master in self._masters.values() if not self._active else ():
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Make masters for parameters that are new, and follow writes from outside to the others.

        Within `in_place` there is nothing to do: the optimizer holds the masters themselves.
        """
        if self._active:
            return
        ours = list(self._in_half_precision().values())
        self._masters = {parameter: self._masters[parameter] for parameter in ours if parameter in self._masters}
        for parameter in ours:
            master = self._masters.get(parameter)
            if master is None or master.shape != parameter.shape or master.device != parameter.device:
                # Dense, so that fused kernels step it rightly, with the strides of the parameter's gradients.
                values = laid_out_for(parameter, parameter.detach().float())
                self._masters[parameter] = nn.Parameter(values)
                self._cast_state(parameter, torch.float32)
            else:
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        self._follow_load()

    def _follow_load(self) -> None:
        """Bring what is remembered to float32 again, where the optimizer has loaded another state."""
        if self._state is not self._optimizer.state:
            self._state = self._optimizer.state
            for parameter in self._masters:
                self._cast_state(parameter, torch.float32)

    def dissolve(self) -> None:
        """Go back to moving the parameters themselves, with what is remembered in their own format."""
        for parameter in self._masters:
            self._cast_state(parameter, parameter.dtype)
        self._masters.clear()

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give the optimizer's state and the masters by the index of their parameter."""
        return {"optimizer": self._optimizer.state_dict(), "masters": self.saved_masters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Load the model's too: a parameter that is no rounded master replaces it.

        Raises:
            StateError: Something is missing, unknown or of another shape; nothing has been changed.
        """
        check_keys(state, ["optimizer", "masters"], of="MasterWeights")
        self.check_masters(state["masters"])
        with self.loading():
            self._optimizer.load_state_dict(state["optimizer"])
        self.load_masters(state["masters"])

    def saved_masters(self) -> dict[int, Tensor]:
        """Give the masters by the index of their parameter among all of the optimizer's."""
        return {
            index: self._masters[parameter].detach()
            for index, parameter in enumerate(parameters_of(self._optimizer))
            if parameter in self._masters
        }

    def check_masters(self, saved: Mapping[int, Tensor]) -> None:
        """Refuse masters of other parameters.

        Raises:
            StateError: They are of other indices or shapes.
        """
        here = {index: tuple(parameter.shape) for index, parameter in self._in_half_precision().items()}
        there = {index: tuple(master.shape) for index, master in saved.items()}
        if here != there:
            raise StateError(f"The masters must be of the shapes {here} by index, got {there}.")

    @torch.no_grad()
    def load_masters(self, saved: Mapping[int, Tensor]) -> None:
        """Take masters over, after `check_masters`."""
        self.refresh()
        for index, parameter in enumerate(parameters_of(self._optimizer)):
            if parameter in self._masters and index in saved:
                self._masters[parameter].copy_(saved[index])

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Have the optimizer load its state for the masters, so that torch keeps that in float32."""
        self.refresh()
        with self._swapped():
            yield

    # Inside ----------------------------------------------------------------------------------

    def _in_half_precision(self) -> dict[int, Tensor]:
        """Return the parameters that need a master, by their index among all of the optimizer's."""
        return {
            index: parameter
            for index, parameter in enumerate(parameters_of(self._optimizer))
            if parameter.dtype in HALF_PRECISION and not is_lazy(parameter)
        }

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        back: dict[Tensor, Tensor] = {master: parameter for parameter, master in self._masters.items()}
        self._replace(self._masters)
        self._active = True
        try:
            yield
        finally:
            # The optimizer may hold other dicts than before, if it has loaded a state.
            self._active = False
            self._replace(back)

    def _replace(self, others: Mapping[Tensor, Tensor]) -> None:
        """Put other tensors into the groups, and what is remembered under them, in order."""
        if not others:
            return
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = others.get(old, old)
                group["params"][index] = new
                if old in state:
                    state[new] = state.pop(old)

    def _gradients_at_masters(self, closure: Callable[[], Any]) -> Any:
        """Have the parameters' gradients computed where the masters are now, and give them to the masters."""
        self._write_back()
        self._active = False
        self._replace({master: parameter for parameter, master in self._masters.items()})
        try:
            loss = closure()
        finally:
            self._replace(self._masters)
            self._active = True
        for parameter, master in self._masters.items():
            master.grad = _gradient_for(master, parameter)
        return loss

    @torch.no_grad()
    def _write_back(self) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for parameter, master in self._masters.items():
            parameters, masters = by_kind[parameter.device, parameter.dtype]
            parameters.append(parameter)
            masters.append(master)
        for parameters, masters in by_kind.values():
            torch._foreach_copy_(parameters, masters)

    def _cast_state(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Keep what is remembered for each element in another format."""
        remembered = self._optimizer.state.get(parameter, {})
        for key, value in remembered.items():
            # torch's optimizers count steps in a tensor, which for a 0-d parameter has its shape.
            if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                remembered[key] = laid_out_for(parameter, value.to(dtype)) if value.is_floating_point() else value


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient_for(master: Tensor, parameter: Tensor) -> Tensor | None:
    """Give a parameter's gradient in float32, with the strides of its master as fused kernels need it."""
    return None if parameter.grad is None else laid_out_for(master, parameter.grad.float())


def asks_for_closure(optimizer: Optimizer) -> bool:
    """Tell whether a step of the optimizer must be given a closure that computes gradients anew."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
