"""Chainer's momentum optimizers, which are created first and get their model by `setup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lockstep import optim
from lockstep.arguments import check_instance
from lockstep.errors import OrderError, warn
from lockstep.optim import HookList
from lockstep.precision import first_nonfinite
from lockstep.state import temporarily

Self = TypeVar("Self", bound="GradientMethod")


Serializer: TypeAlias = Callable[[str, Any], Any]
"""A function that takes a key and a value, and returns the value or, when loading, the saved one.

``state.setdefault`` of a dict is such a function: with an empty dict it saves, with a filled one it loads."""


def serialize(owner: Any, key: str, serializer: Serializer) -> None:
    """Save or load the state of an object that has ``state_dict`` and ``load_state_dict``.

    Args:
        owner: The object.
        key: The key for the serializer.
        serializer: A `Serializer`.
    """
    state = owner.state_dict()
    loaded = serializer(key, state)
    # When saving, a serializer returns the object that it was given.
    if loaded is not state:
        owner.load_state_dict(loaded)


class GradientMethod(optim.HookedOptimizer):
    """The methods that Chainer's optimizers have in addition to those of the core: `setup`, `target` and others.

    A parameter without a gradient is treated as one with a gradient of zeros, so that momentum still moves it.

    Attributes:
        target: The model, after `setup`.
        rules: The update rules of the parameters that have groups of their own.
    """

    is_elementwise = False  # rules belong to whole parameters
    target: nn.Module | None = None
    rules: Sequence[UpdateRule] = ()

    def setup(self: Self, link: nn.Module) -> Self:
        """Set the model, and reset the optimizer: no hooks, no counts, no velocities, no options of single parameters.

        Settings for loss scaling and fp32 updates are kept.

        Args:
            link: The model whose parameters are optimized.

        Returns:
            The optimizer itself.

        Raises:
            TypeError: If it is not a module.
        """
        check_instance("link", link, nn.Module, "a torch.nn.Module")
        # The current options, which may have been set after the optimizer was created.
        options = {**self.param_groups[0], "params": list(link.parameters())}
        self.param_groups.clear()
        self.state.clear()
        self._hooks = HookList()
        self.rules = ()
        self.t = self.epoch = 0
        self.add_param_group(options)
        self.target = link
        for parameter in link.parameters():
            parameter.update_rule = UpdateRule(self, parameter)  # type: ignore[attr-defined]  # the name is Chainer's
        return self

    def _set_option(self, name: str, value: object) -> None:
        super()._set_option(name, value)
        for rule in self.rules:
            if name not in rule.own:
                rule.group()[name] = value

    def set_of_group(self, index: int, name: str, value: object) -> None:
        """Set an option of one group.

        Args:
            index: The index of the group.
            name: The name of the option.
            value: Its value.

        Raises:
            ValueError: If the value is out of range.
        """
        self._check_options({**self.param_groups[index], name: value})
        self.param_groups[index][name] = value

    def update(  # type: ignore[override]  # the name is Chainer's
        self, lossfun: Callable[..., Tensor] | None = None, *args: Any, **kwds: Any
    ) -> Tensor | None:
        """Run a complete training step; see `lockstep.CorrectedMomentumSGD.update`.

        Args:
            lossfun: A function that returns the loss. Without it the existing gradients are used.
            *args: The positional arguments of ``lossfun``.
            **kwds: The keyword arguments of ``lossfun``.

        Raises:
            OrderError: If there is no model yet.
        """
        self._check_set_up()
        return super().update(lossfun, *args, **kwds)

    def add_hook(
        self, hook: Callable[..., object], name: str | None = None, timing: str = "auto", *, group: int | None = None
    ) -> None:
        """Register a function to be called in every update; ``call_for_each_param`` of Chainer's hooks is supported.

        Args:
            hook: The function, called as ``hook(optimizer)`` or as ``hook(optimizer, parameter)``.
            name: The name of the hook; by default ``hook.name``, otherwise ``hook.__name__``.
            timing: When to call it: "pre", "post" or "auto".
            group: The index of a parameter group, for a hook of that group.

        Raises:
            OrderError: If there is no model yet.
            TypeError: If the hook is not callable.
            ValueError: If the timing is unknown, or the hook has no name.
            KeyError: If the name is already in use.
        """
        self._check_set_up()
        super().add_hook(_adapt_hook(hook), name, timing, group=group)

    @torch.no_grad()
    def call_hook(self, hook: Callable[..., object]) -> None:
        """Call a hook now, registered or not, once or for each parameter as its attributes define.

        Args:
            hook: The hook to call.
        """
        self.fill_missing_grads()
        if not getattr(_adapt_hook(hook), "per_parameter", False):
            hook(self)
            return
        for parameter in self.moving_parameters():
            hook(self, parameter)

    def check_nan_in_grads(self) -> None:
        """Warn about each parameter whose gradient is not finite, by name; see `is_safe_to_update`."""
        for name, parameter in self._check_set_up().named_parameters():
            if first_nonfinite({name: parameter.grad}) is not None:
                warn(f"The gradient of {name!r} is not finite at t = {self.t}.")

    def create_update_rule(self) -> UpdateRule:
        """Return the arithmetic for single parameters, with the options of this optimizer."""
        return UpdateRule(self)

    def reallocate_cleared_grads(self) -> None:
        """Set gradients of zeros for parameters without a gradient."""
        self.fill_missing_grads()

    def use_cleargrads(self, use: bool = True) -> None:  # noqa: ARG002 - both ways give one result
        """Have no effect: gradients are cleared and missing ones treated as zeros, so that both settings are equal.

        Args:
            use: Chainer's setting, which is ignored.
        """
        warn("`use_cleargrads` changes nothing; remove the call.", DeprecationWarning)

    def serialize(self, serializer: Serializer) -> None:
        """Save or load everything that the next update depends on, except for the weights.

        Args:
            serializer: A `Serializer`, which is called with the key "optimizer".

        Raises:
            StateError: If the loaded state does not fit.
        """
        serialize(self, "optimizer", serializer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "target": self.target, "rules": self.rules}

    def _check_set_up(self) -> nn.Module:
        """Return the model, or raise an error if there is none."""
        if self.target is None:
            raise OrderError("`setup` must be called with a model first.")
        return self.target


class CorrectedMomentumSGD(GradientMethod, optim.CorrectedMomentumSGD):
    """Momentum SGD whose velocity does not contain the learning rate, based on `lockstep.CorrectedMomentumSGD`.

    Args:
        lr: The learning rate, at least 0.
        momentum: The momentum, in [0, 1).

    Raises:
        ValueError: If a number is out of range.

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
    """Momentum SGD whose velocity contains the learning rate, based on `lockstep.MomentumSGD`.

    Args:
        lr: The learning rate, at least 0.
        momentum: The momentum, in [0, 1).

    Raises:
        ValueError: If a number is out of range.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, equation 10.
    """

    def __init__(self, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__([{"params": []}], lr=lr, momentum=momentum, missing_grad="zero")


class UpdateRule:
    """The arithmetic of an optimizer for single parameters; the velocities are those of the optimizer.

    After `setup`, each parameter has one as ``parameter.update_rule``. What you set on it gives the parameter a group
    of its own: options (``hyperparam``), hooks, and ``enabled``. Options that are not set follow the optimizer's. (An
    `UpdateSchedule` also sets the options of such groups, as torch's schedulers do.)

    Args:
        optimizer: The optimizer, whose options are read at each update.
        param: The parameter that the rule belongs to; None for a rule of any.
    """

    def __init__(self, optimizer: GradientMethod, param: Tensor | None = None) -> None:
        self.optimizer = optimizer
        self.param = param
        self.own: set[str] = set()
        """The names of the options that were set here."""
        self._enabled = True
        self._offset = 0
        self.in_pre_hook = False
        """Whether a hook of timing "pre" is called now."""

    @property
    def t(self) -> int:
        """The number of updates of the parameter, which in a hook of timing "pre" includes the current one.

        Updates in which the rule is disabled are not counted; a resume after it was enabled again counts them.
        """
        counted = self.enabled and self.param is not None
        return self._offset + counted * (self.optimizer.t + self.in_pre_hook)

    @property
    def hyperparam(self) -> Hyperparameter:
        """The options of the parameter, as attributes that you can set."""
        return Hyperparameter(self)

    @property
    def enabled(self) -> bool:
        """Whether updates change the parameter. You can set it."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if self.param is not None:
            self.set_option("frozen", not enabled)
            # The optimizer's count is added while the rule is enabled, see `t`.
            self._offset += self.optimizer.t * (self._enabled - enabled)
        self._enabled = enabled

    def update(self, param: Tensor) -> None:
        """Update one parameter from its gradient, without hooks.

        Args:
            param: A parameter of the optimizer.
        """
        if self.enabled:
            self._offset += 1
            self.optimizer.part([{**self.group(param), "params": [param]}]).advance()

    def group(self, param: Tensor | None = None) -> dict[str, Any]:
        """Return the group of a parameter, by default that of this rule, or else the first.

        Args:
            param: The parameter.
        """
        wanted = self.param if param is None else param
        groups = self.optimizer.param_groups
        return next((group for group in groups[1:] if any(each is wanted for each in group["params"])), groups[0])

    def set_option(self, name: str, value: object) -> None:
        """Set an option of the parameter alone.

        Args:
            name: The name of the option.
            value: Its value.

        Raises:
            AttributeError: If the optimizer has no such option.
            ValueError: If the value is out of range.
        """
        if name not in self.optimizer.defaults:
            raise AttributeError(f"The options are {sorted(self.optimizer.defaults)}, got {name!r}.")
        self.optimizer.set_of_group(self.own_group(), name, value)
        self.own.add(name)

    def add_hook(self, hook: Callable[..., object], name: str | None = None, timing: str = "auto") -> None:
        """Register a function to be called as ``hook(rule, parameter)`` in every update of the parameter.

        Args:
            hook: The function.
            name: The name of the hook; by default ``hook.name``, otherwise ``hook.__name__``.
            timing: When to call it: "pre", "post" or "auto".
        """
        index = self.own_group()
        self.optimizer.add_hook(_PerParameterHook(hook, self, timing), name, timing, group=index)

    def remove_hook(self, name: str) -> None:
        """Remove a hook of the parameter.

        Args:
            name: The name of the hook.
        """
        self.optimizer.remove_hook(name, group=self.own_group())

    def own_group(self) -> int:
        """Return the index of the group of the parameter alone, which is created where there is none.

        Raises:
            OrderError: If the rule belongs to no parameter, or the optimizer has master weights already.
        """
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if self.param is None:
            raise OrderError("`parameter.update_rule` must be used for options and hooks of one parameter.")
        if self not in optimizer.rules:
            if optimizer.masters is not None:
                raise OrderError("`use_fp32_update` must be called after the options of parameters are set.")
            groups[0]["params"] = [each for each in groups[0]["params"] if each is not self.param]
            optimizer.add_param_group({**groups[0], "params": [self.param]})
            optimizer.rules = [*optimizer.rules, self]
        return next(index for index, group in enumerate(groups) if group is self.group())


class Hyperparameter:
    """The options of one parameter: those that were set on it, and otherwise those of the optimizer.

    Args:
        rule: The update rule of the parameter.
    """

    def __init__(self, rule: UpdateRule) -> None:
        vars(self)["_rule"] = rule

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self)["_rule"].optimizer.defaults:
            raise AttributeError(f"The options are {sorted(vars(self)['_rule'].optimizer.defaults)}, got {name!r}.")
        return vars(self)["_rule"].group()[name]

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["_rule"].set_option(name, value)


class _PerParameterHook:
    """Wraps a hook that Chainer calls for each parameter, with the attributes that the core reads."""

    per_parameter = True

    def __init__(self, hook: Any, rule: UpdateRule | None = None, timing: str = "auto") -> None:
        self.hook = hook
        self.rule = rule
        self.name = getattr(hook, "name", None) or getattr(hook, "__name__", None)
        self.timing = getattr(hook, "timing", "pre") if timing == "auto" else timing

    def __call__(self, optimizer: optim.HookedOptimizer, parameter: Tensor) -> None:
        if self.rule is None:
            self.hook(optimizer, parameter)
            return
        with temporarily(self.rule, in_pre_hook=self.timing == "pre"):
            self.hook(self.rule, parameter)


def _adapt_hook(hook: Callable[..., object]) -> Callable[..., object]:
    """Return a hook with the core's attribute ``per_parameter`` if it has Chainer's ``call_for_each_param``."""
    return _PerParameterHook(hook) if getattr(hook, "call_for_each_param", False) else hook
