"""Chainer's momentum rules: made first, given a model afterwards by `setup`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep import optim
from lockstep.errors import OrderError
from lockstep.optim import HookList
from lockstep.precision import first_nonfinite

Self = TypeVar("Self", bound="GradientMethod")


class Serializer(Protocol):
    """Takes a key and a value, and gives back the value, or in its place one that was saved.

    ``state.setdefault`` of a dict is one: an empty dict is written to, a filled one is read from.
    """

    def __call__(self, key: str, value: Any, /) -> Any:
        """Save the value under the key and give it back, or give what was saved."""


class GradientMethod(optim.HookedOptimizer):
    """What Chainer's optimizers have beside those of the core: `setup`, `target` and a few more calls.

    A parameter without gradient counts as one with a gradient of zeros, so that momentum still moves it.

    Attributes:
        target: The model, after `setup`.
    """

    target: nn.Module | None = None

    def setup(self: Self, link: nn.Module) -> Self:
        """Take a model's parameters, and begin anew: no hooks, no counts, no velocities.

        Loss scaling and float32 update stay as they were set.

        Args:
            link: The model.

        Returns:
            The optimizer itself.

        Raises:
            TypeError: It is no module.
        """
        if not isinstance(link, nn.Module):
            raise TypeError(f"`link` must be a torch.nn.Module, got a {type(link).__name__}.")
        options = {**self.param_groups[0], "params": list(link.parameters())}
        self.param_groups.clear()
        self.state.clear()
        self._hooks = HookList()
        self.t = self.epoch = 0
        self.add_param_group(options)
        self.target = link
        return self

    def update(  # type: ignore[override]  # the name is Chainer's
        self, lossfun: Callable[..., Tensor] | None = None, *args: Any, **kwds: Any
    ) -> Tensor | None:
        """Do a whole training step; see `lockstep.CorrectedMomentumSGD.update`.

        Args:
            lossfun: Returns the loss. Without it the gradients that are there are used.
            *args: Given to ``lossfun``.
            **kwds: Given to ``lossfun``.

        Raises:
            OrderError: There is no model yet.
        """
        self._check_set_up()
        return super().update(lossfun, *args, **kwds)

    def add_hook(
        self,
        hook: Callable[..., object],
        name: str | None = None,
        timing: str = "auto",
        *,
        group: int | None = None,
    ) -> None:
        """Have a function called in every update, also one that says ``call_for_each_param``.

        Args:
            hook: Called as ``hook(optimizer)``, or as ``hook(optimizer, parameter)``.
            name: By default ``hook.name``, else ``hook.__name__``.
            timing: "pre", "post" or "auto".
            group: The index of a parameter group, for a hook of its own.

        Raises:
            OrderError: There is no model yet.
            TypeError: The hook is not callable.
            ValueError: The timing is unknown, or there is no name.
            KeyError: The name is taken.
        """
        self._check_set_up()
        super().add_hook(_in_our_words(hook), name, timing, group=group)

    @torch.no_grad()
    def call_hook(self, hook: Callable[..., object]) -> None:
        """Call one hook now, registered or not, once or for each parameter as it says."""
        self.fill_missing_grads()
        if not getattr(_in_our_words(hook), "per_parameter", False):
            hook(self)
            return
        for parameter in self.moving_parameters():
            hook(self, parameter)

    def check_nan_in_grads(self) -> None:
        """Warn of each parameter by name whose gradient is not finite; see `is_safe_to_update`."""
        for name, parameter in self._check_set_up().named_parameters():
            if first_nonfinite({name: parameter.grad}) is not None:
                warnings.warn(f"The gradient of {name!r} is not finite at t = {self.t}.", stacklevel=2)

    def create_update_rule(self) -> UpdateRule:
        """Give the arithmetic for one parameter at a time, with this optimizer's options."""
        return UpdateRule(self)

    def reallocate_cleared_grads(self) -> None:
        """Give zeros to parameters without gradient."""
        self.fill_missing_grads()

    def use_cleargrads(self, use: bool = True) -> None:  # noqa: ARG002 - both ways give one result
        """Do nothing: gradients are cleared, and missing ones are zeros, so both ways give one result."""
        warnings.warn("`use_cleargrads` changes nothing; take the call out.", DeprecationWarning, stacklevel=2)

    def serialize(self, serializer: Serializer) -> None:
        """Save everything the next update depends on but the weights, or load it.

        Args:
            serializer: See `Serializer`; the key is "optimizer".

        Raises:
            StateError: What was loaded does not fit.
        """
        state = self.state_dict()
        loaded = serializer("optimizer", state)
        if loaded is not state:
            self.load_state_dict(loaded)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "target": self.target}

    def _check_set_up(self) -> nn.Module:
        """Give the model, or refuse a call that needs one."""
        if self.target is None:
            raise OrderError("`setup` must be called with a model first.")
        return self.target


class CorrectedMomentumSGD(GradientMethod, optim.CorrectedMomentumSGD):
    """Momentum free of the learning rate; see `lockstep.CorrectedMomentumSGD`, which does it.

    Args:
        lr: At least 0.
        momentum: In [0, 1).

    Raises:
        ValueError: A number is out of range.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, equation 9.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = CorrectedMomentumSGD(lr=0.1).setup(model)
    >>> loss = optimizer.update(lambda x: model(x).sum(), torch.ones(1, 2))
    >>> optimizer.t, optimizer.target is model
    (1, True)
    """

    def __init__(self, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__([{"params": []}], lr=lr, momentum=momentum, missing_grad="zero")


class MomentumSGD(GradientMethod, optim.MomentumSGD):
    """Momentum with the learning rate inside; see `lockstep.MomentumSGD`, which does it.

    Args:
        lr: At least 0.
        momentum: In [0, 1).

    Raises:
        ValueError: A number is out of range.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, equation 10.
    """

    def __init__(self, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__([{"params": []}], lr=lr, momentum=momentum, missing_grad="zero")


class UpdateRule:
    """The arithmetic of an optimizer for one parameter at a time; velocities are the optimizer's.

    Args:
        optimizer: Whose options as they are at each update.

    Attributes:
        enabled: Whether `update` does anything.
        t: How often it did.
    """

    def __init__(self, optimizer: GradientMethod) -> None:
        self.optimizer = optimizer
        self.enabled = True
        self.t = 0

    def update(self, param: Tensor) -> None:
        """Move one parameter by its gradient, without hooks."""
        if self.enabled:
            self.t += 1
            self.optimizer.part([{**self.optimizer.param_groups[0], "params": [param]}]).advance()


class _PerParameter:
    """A hook of Chainer's that is called for each parameter, in the core's words."""

    per_parameter = True

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.name = getattr(hook, "name", None) or getattr(hook, "__name__", None)
        self.timing = getattr(hook, "timing", "pre")

    def __call__(self, optimizer: optim.HookedOptimizer, parameter: Tensor) -> None:
        self.hook(optimizer, parameter)


def _in_our_words(hook: Callable[..., object]) -> Callable[..., object]:
    """Have a hook say in the core's words that it is called for each parameter, if it does in Chainer's."""
    return _PerParameter(hook) if getattr(hook, "call_for_each_param", False) else hook
