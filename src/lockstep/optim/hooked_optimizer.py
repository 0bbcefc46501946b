"""The base of lockstep's optimizers: a training step with hooks, half precision, counters and saved state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from lockstep.arguments import check_choice
from lockstep.errors import OrderError, StateError
from lockstep.optim.hook_list import TIMINGS, HookList, describe
from lockstep.optim.options import check_names, check_options, check_saved, run_load_pre_hooks, without_pre_hooks
from lockstep.precision import LossScale, LossScaler, MasterWeights, RampLossScale

Self = TypeVar("Self", bound="HookedOptimizer")

_ATTRIBUTES = ("t", "epoch", "use_auto_new_epoch", "_hooks", "_scaler", "_masters")


class HookedOptimizer(Optimizer):
    """A torch optimizer with hooks around its arithmetic, which can scale the loss and update master weights.

    `step` runs the closure, the hooks of timing "pre", `advance`, the count and the hooks of timing "post", in
    this order. A subclass lists in `_state_names` the tensors that it keeps for each parameter, and implements the
    arithmetic in `_advance_lists`; or it overrides `advance` and `state_keys`.

    `update` is a complete training step on one device: it scales the loss, runs backward, divides the gradients
    by the scale, calls `step` if they are all finite, and updates the scale. `loss_scaling` and `use_fp32_update`
    enable what half precision needs.

    The options of a group are passed to the constructor, or in the dict of a parameter group, which is how
    parameters get options of their own. They are ``lr``, those of the optimizer's rule (such as ``momentum``) and:

    * ``missing_grad``: what happens to a parameter without a gradient. "skip" (torch's behavior) leaves it
      unchanged; "zero" (Chainer's) treats the gradient as zeros, so that momentum still moves the parameter.
    * ``frozen``: if True, the parameters and their state are left unchanged regardless of their gradients, and
      hooks skip them. You can change it at any time.

    Attributes:
        t: The number of applied updates.
        epoch: The number of calls of `new_epoch`.
        use_auto_new_epoch: Whether an updater calls `new_epoch`; if so, nothing else may call it.
    """

    is_elementwise: ClassVar[bool] = False
    """Whether `advance` gives the same bits if parameters are cut into pieces of whole vectors."""

    _state_names: ClassVar[tuple[str, ...]] = ("velocity",)

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.t = self.epoch = 0
        self.use_auto_new_epoch = False
        self._hooks = HookList()
        self._scaler: LossScaler | None = None
        self._masters: MasterWeights | None = None
        if isinstance(params, torch.nn.Module):
            raise TypeError(f"`params` must be parameters, got a {type(params).__name__}. Pass model.parameters().")
        super().__init__(params, defaults)

    # Arithmetic ------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> None:
        """Apply one step to the weights.

        No hook is called and nothing is counted, and the state belongs to single parameters. Parts of the
        parameters can therefore advance one after another, or in several threads at once, with the same bits as
        all of them together: create the parts with `part`, and pass `step` a function that advances them all.
        """
        self.fill_missing_grads()
        for group in self.param_groups:
            weights: list[Tensor] = []
            grads: list[Tensor] = []
            states: list[list[Tensor]] = [[] for _ in self._state_names]
            self._init_group(group, weights, grads, *states)
            # Of one device and one dtype each, as the multi-tensor kernels require.
            lists = cast("list[list[Tensor | None]]", [weights, *states, grads])
            for some, _ in self._group_tensors_by_device_and_dtype(lists).values() if weights else ():
                self._advance_lists(group, *cast("list[list[Tensor]]", some))

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:  # noqa: ARG002 - the same in all groups
        """Return the keys of the state of a parameter in this group."""
        return frozenset(self._state_names)

    def part(self: Self, groups: list[dict[str, Any]]) -> Self:
        """Return a shallow copy that holds these groups and shares the state of the parameters.

        The copy has no hooks, no loss scale and no master weights. Its count starts at the current value and
        is not shared. `copy.copy` returns such a copy with all groups.

        Args:
            groups: Groups with any of this optimizer's parameters, for example
                ``[{**group, "params": group["params"][:3]}]``.
        """
        twin = type(self).__new__(type(self))
        bare = {"_hooks": HookList(), "_scaler": None, "_masters": None}
        twin.__setstate__({**self.__getstate__(), **bare, "param_groups": groups})
        return twin

    @abstractmethod
    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """Apply a step to weights of one device and one dtype.

        Args:
            group: The parameter group whose options apply.
            *lists: The weights, one list for each name in `_state_names`, and the gradients.
        """

    def _init_group(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], *states: list[Tensor]
    ) -> None:
        """Collect the parameters to update with their state.

        `torch.compile` looks for a method of this name, and runs it eagerly.
        """
        if group["frozen"]:
            return
        for weight in group["params"]:
            if weight.grad is not None:
                state = self.state[weight]
                if self._state_names[0] not in state:
                    self._init_state(state, weight)
                weights.append(weight)
                grads.append(weight.grad)
                for name, tensors in zip(self._state_names, states, strict=True):
                    tensors.append(state[name])

    def _init_state(self, state: dict[str, Any], weight: Tensor) -> None:
        """Create the state of a parameter, before its first step."""
        # `zeros_like` keeps the strides of the weight, without which the kernels lose their fast path.
        state.update({name: torch.zeros_like(weight) for name in self._state_names})

    # The public step -------------------------------------------------------------------------

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

    @overload
    def step(self, closure: None = None, *, advance: Callable[[], None] | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, advance: Callable[[], None] | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, advance: Callable[[], None] | None = None
    ) -> float | None:
        """Apply one update: hooks, arithmetic, count, hooks.

        Args:
            closure: A function that clears the gradients, computes the loss, calls backward and returns the loss.
            advance: A function that does the arithmetic for all parameters instead of `advance`, for example
                part by part in several threads.

        Returns:
            The loss of the closure, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._masters is None or self._masters.active:
            self._move(advance or self.advance)
        else:
            # Hooks and arithmetic must see the master weights, whose gradients are those of the parameters.
            self._masters.copy_gradients()
            with self._masters.replacing_parameters():
                self._move(advance or self.advance)
        return loss

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch.

        Args:
            auto: Whether an updater makes the call; it must have set `use_auto_new_epoch` before.

        Raises:
            OrderError: If ``auto`` is not `use_auto_new_epoch`: an updater calls without having set it, or you call
                while an updater does.
        """
        if auto != self.use_auto_new_epoch:
            owner = "the updater" if self.use_auto_new_epoch else "you"
            raise OrderError(
                f"`new_epoch` must be called by {owner} while `use_auto_new_epoch` is "
                f"{self.use_auto_new_epoch}, got a call with auto={auto}."
            )
        self.epoch += 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: A dict of "params" and any options; missing options take the constructor's values.

        Raises:
            TypeError: If this optimizer cannot update a parameter.
            ValueError: If an option is out of range, or this optimizer does not have it, or cannot apply it to a
                parameter.
        """
        check_names(param_group, self.defaults, optimizer=type(self).__name__)
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        # Checked after it was added, because torch accepts "params" in several forms until then.
        try:
            self._check_parameters(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    @property
    def lr(self) -> float | Tensor:
        """The learning rate η of the first group, at least 0. You can set it."""
        return cast("float | Tensor", self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, lr: float | Tensor) -> None:
        self._set_option("lr", lr)

    @property
    def momentum(self) -> float:
        """The momentum m of the first group, in [0, 1). You can set it."""
        return cast("float", self.param_groups[0]["momentum"])

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._set_option("momentum", momentum)

    def _set_option(self, name: str, value: object) -> None:
        """Set an option of the first group."""
        self._check_options({**self.param_groups[0], name: value})
        self.param_groups[0][name] = value

    # Half precision --------------------------------------------------------------------------

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

    # Hooks -----------------------------------------------------------------------------------

    def add_hook(
        self, hook: Callable[..., object], name: str | None = None, timing: str = "auto", *, group: int | None = None
    ) -> None:
        """Register a function to be called in every update.

        It is called as ``hook(optimizer)``. If it has an attribute ``per_parameter`` that is true, it is called as
        ``hook(optimizer, parameter)`` for each parameter that has a gradient and is not frozen. Hooks of timing
        "pre" may change gradients; hooks of timing "post" see the updated weights and the new `t`. Hooks of one
        group, or of the whole optimizer, are called in the order in which they were added.

        Args:
            hook: The function to call.
            name: The name for `remove_hook`; by default ``hook.name``, otherwise ``hook.__name__``.
            timing: When to call it: "pre", "post", or "auto" for ``hook.timing``, which is "pre" if not defined.
            group: The index of a parameter group. The hook is then called with a `part` that holds only this group.

        Raises:
            TypeError: If the hook is not callable.
            ValueError: If the timing is unknown, the hook has no name, or the group does not exist.
            KeyError: If the name is already in use.
        """
        if isinstance(hook, type):
            raise TypeError(f"`hook` must be a function or an object, got the class {hook.__name__}. Create one of it.")
        last = len(self.param_groups) - 1
        if group is not None and not 0 <= group <= last:
            raise ValueError(f"`group` must lie in 0..{last}, got {group}.")
        self._hooks.add(describe(hook, name, timing, group))

    @property
    def hooks(self) -> list[Callable[..., object]]:
        """The hooks in the order in which they were added."""
        return self._hooks.functions()

    def remove_hook(self, name: str, *, group: int | None = None) -> None:
        """Remove a hook.

        Args:
            name: The name of the hook.
            group: The index of its parameter group; None for hooks of the whole optimizer.

        Raises:
            KeyError: If there is no such hook.
        """
        self._hooks.remove(name, group)

    @torch.no_grad()
    def call_hooks(self, timing: str = "pre") -> None:
        """Call the hooks of one timing, as `step` does.

        Args:
            timing: The timing, "pre" or "post".

        Raises:
            ValueError: If the timing is unknown.
        """
        check_choice("timing", timing, TIMINGS)
        for entry in self._hooks.with_timing(timing):
            # Before every hook, because the previous one may have cleared gradients.
            self.fill_missing_grads()
            target = self if entry.group is None else self.part([self.param_groups[entry.group]])
            if entry.per_parameter:
                for parameter in target.moving_parameters():
                    entry.hook(target, parameter)
            else:
                entry.hook(target)

    def moving_parameters(self) -> list[Tensor]:
        """List the parameters that an update would change now: those with a gradient that are not frozen."""
        self.fill_missing_grads()
        moving = [group for group in self.param_groups if not group["frozen"]]
        return [weight for group in moving for weight in group["params"] if weight.grad is not None]

    def fill_missing_grads(self) -> None:
        """Set gradients of zeros for parameters without a gradient in groups of ``missing_grad="zero"``.

        A parameter of a lazy module has no shape before its first forward, and is left out until then.
        """
        for group in self.param_groups:
            if group["missing_grad"] == "zero" and not group["frozen"]:
                for weight in group["params"]:
                    if weight.grad is None and weight.requires_grad and not is_lazy(weight):
                        weight.grad = torch.zeros_like(weight)

    def _move(self, advance: Callable[[], None]) -> None:
        """Run the hooks, the arithmetic and the count of one step, once the gradients are there."""
        self.call_hooks("pre")
        advance()
        self.t += 1
        self.call_hooks("post")

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, state per parameter, counters, hook states, loss scale and master weights."""
        packed = super().state_dict()
        # Threads may have created the entries in any order; a saved state must not depend on it.
        state = {index: packed["state"][index] for index in sorted(packed["state"])}
        return {
            **packed,
            "state": state,
            "t": self.t,
            "epoch": self.epoch,
            "hooks": self._hooks.state_dict(),
            "loss_scale": None if self._scaler is None else self._scaler.state_dict(),
            "masters": None if self._masters is None else self._masters.saved_masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; nothing changes if it does not fit.

        Keys that torch's schedulers store in the groups are kept; other unknown keys are rejected. Hooks of
        `register_load_state_dict_pre_hook` run first, and the state they return is what must fit.

        Raises:
            StateError: If something is missing, unknown or has another shape, or the state comes from other hooks,
                another kind of loss scale, or an optimizer with master weights where this one has none.
        """
        state_dict = self._converted(run_load_pre_hooks(self, state_dict))
        # Everything is checked before the first change. Only a hook can raise after that: hooks go first, and are
        # rolled back.
        self._check_state_dict(state_dict)
        self._hooks.load_state_dict(state_dict["hooks"])
        plain = {key: state_dict[key] for key in ("state", "param_groups")}
        loading = nullcontext() if self._masters is None else self._masters.loading()
        with loading, without_pre_hooks(self):
            super().load_state_dict(plain)
        if self._masters is not None:
            self._masters.load_masters(state_dict["masters"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict["loss_scale"])
        self.t, self.epoch = state_dict["t"], state_dict["epoch"]

    def __getstate__(self) -> dict[str, Any]:
        # torch's `__getstate__` leaves all but its own attributes out, so a pickled optimizer would lose ours.
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in _ATTRIBUTES}}

    def __copy__(self: Self) -> Self:
        return self.part(self.param_groups)

    # Checks ----------------------------------------------------------------------------------

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Check that the options of a group are in range."""
        check_options(options)

    def _check_parameters(self, group: Mapping[str, Any]) -> None:
        """Check that this optimizer can update the parameters of a group; any by default."""

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state of this optimizer for one of another kind that it can load."""
        return state_dict

    def _check_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Check that a state was written by an optimizer of the same kind and groups."""
        wanted = {"state", "param_groups", "hooks", "loss_scale", "masters", "t", "epoch"}
        check_saved(saved, self.param_groups, wanted=wanted, options=self.defaults, state_keys=self.state_keys)
        self._hooks.check(saved["hooks"])
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
