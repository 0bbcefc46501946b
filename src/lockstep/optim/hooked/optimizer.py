"""What lockstep's optimizers have in common: hooks, counters, missing gradients, saved state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from lockstep.errors import OrderError
from lockstep.optim.hooked.hook_list import TIMINGS, HookList, describe
from lockstep.optim.hooked.load_hooks import migrated, without_pre_hooks
from lockstep.optim.hooked.options import check_names, check_options
from lockstep.optim.hooked.saved_state import check_saved
from lockstep.optim.hooked.scaled import ScaledOptimizer

Self = TypeVar("Self", bound="HookedOptimizer")

_COUNTERS = ("t", "epoch")
_OWN = ("use_auto_new_epoch", "_hooks", "_scaler", "_masters")


class HookedOptimizer(ScaledOptimizer):
    """An optimizer in torch's conventions with hooks around its arithmetic.

    `step` is, in this order: the closure, the hooks of timing "pre", `advance`, the count, the hooks
    of timing "post". A subclass writes `advance`, the arithmetic, and names its state per parameter.

    `update` is a whole training step on one device. `loss_scaling` and `use_fp32_update` turn on what half
    precision needs; see `ScaledOptimizer`.

    A group's options, given to the constructor or in the dict of a group (which is how parameters
    get values of their own), are ``lr``, those of its rule (as ``momentum``) and:

    * ``missing_grad``: what a parameter without a gradient does. "skip" (torch's way) leaves it
      alone; "zero" (Chainer's) gives it a gradient of zeros, so that momentum still moves it.
    * ``frozen``: True leaves the parameters and their state alone, whatever their gradients; hooks
      pass them over. May be changed at any time.

    Attributes:
        t: How many updates were applied.
        epoch: How often `new_epoch` was called.
        use_auto_new_epoch: Whether an updater calls `new_epoch`, and nobody else may.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.t = 0
        self.epoch = 0
        self.use_auto_new_epoch = False
        self._hooks = HookList()
        super().__init__(params, defaults)

    # Arithmetic ------------------------------------------------------------------------------

    @abstractmethod
    def advance(self) -> None:
        """Move the weights one step by their gradients, and do nothing else.

        No hook is called and nothing is counted, and what is remembered belongs to one parameter.
        So parts of the parameters may advance one after another or in several threads at once, to
        the same bits as all together: take the parts with `part`, and have `step` call what makes
        all of them advance.
        """

    @abstractmethod
    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:
        """Name what is remembered for a parameter of this group."""

    def part(self: Self, groups: list[dict[str, Any]]) -> Self:
        """Return a shallow copy that holds these groups and shares the state of the parameters.

        It has no hooks, no loss scale and no masters, and a count of its own that begins here.
        `copy.copy` gives the same with all groups.

        Args:
            groups: Groups with any of this optimizer's parameters, say
                ``[{**group, "params": group["params"][:3]}]``.
        """
        twin = type(self).__new__(type(self))
        bare = {"_hooks": HookList(), "_scaler": None, "_masters": None}
        twin.__setstate__({**self.__getstate__(), **bare, "param_groups": groups})
        return twin

    # The public step -------------------------------------------------------------------------

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
            closure: Clears the gradients, computes the loss, calls backward and returns the loss.
            advance: Does the arithmetic for all parameters in the place of `advance`, say part by part
                in several threads.

        Returns:
            The loss of the closure, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._masters is None or self._masters.active:
            self._move(advance or self.advance)
        else:
            self._masters.take_gradients()
            with self._masters.in_place():
                self._move(advance or self.advance)
        return loss

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch.

        Args:
            auto: True when an updater calls, who sets `use_auto_new_epoch` before.

        Raises:
            OrderError: The updater calls without having said so, or somebody else calls although
                the updater does.
        """
        if auto != self.use_auto_new_epoch:
            owner = "the updater" if self.use_auto_new_epoch else "you"
            raise OrderError(
                f"`new_epoch` must be called by {owner} while `use_auto_new_epoch` is "
                f"{self.use_auto_new_epoch}, got a call with auto={auto}."
            )
        self.epoch += 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters in, with options of their own.

        Args:
            param_group: "params" and any of the options; the others are those of the constructor.

        Raises:
            ValueError: An option is out of range, or is none of this optimizer's.
        """
        check_names(param_group, self.defaults, optimizer=type(self).__name__)
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @property
    def lr(self) -> float | Tensor:
        """The learning rate η of the first group; may be set, at least 0."""
        return cast("float | Tensor", self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, lr: float | Tensor) -> None:
        self._set_option("lr", lr)

    @property
    def momentum(self) -> float:
        """The momentum m of the first group; may be set, in [0, 1)."""
        return cast("float", self.param_groups[0]["momentum"])

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._set_option("momentum", momentum)

    def _set_option(self, name: str, value: object) -> None:
        """Change an option of the first group."""
        self._check_options({**self.param_groups[0], name: value})
        self.param_groups[0][name] = value

    # Hooks -----------------------------------------------------------------------------------

    def add_hook(
        self,
        hook: Callable[..., object],
        name: str | None = None,
        timing: str = "auto",
        *,
        group: int | None = None,
    ) -> None:
        """Have a function called in every update.

        It is called as ``hook(optimizer)``; if it has a true attribute ``per_parameter``, as
        ``hook(optimizer, parameter)`` for each parameter that has a gradient and is not frozen.
        Those of timing "pre" may change gradients, those of timing "post" find the weights moved and
        `t` counted. Hooks of one place are called in the order they were added.

        Args:
            hook: The function.
            name: What `remove_hook` knows it by; by default ``hook.name``, else ``hook.__name__``.
            timing: "pre", "post" or "auto": ``hook.timing``, and "pre" where it says nothing.
            group: The index of a parameter group. The hook then gets a `part` with that group alone.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The timing is unknown, there is no name, or no such group.
            KeyError: The name is taken.
        """
        self._check_group(group)
        self._hooks.add(describe(hook, name, timing, group))

    def remove_hook(self, name: str, *, group: int | None = None) -> None:
        """Have a function called no more.

        Args:
            name: The name it was added by.
            group: The index of its parameter group; None for the optimizer's own.

        Raises:
            KeyError: There is no such hook.
        """
        self._hooks.remove(name, group)

    @torch.no_grad()
    def call_hooks(self, timing: str = "pre") -> None:
        """Call the hooks of one timing, as `step` does.

        Args:
            timing: "pre" or "post".

        Raises:
            ValueError: The timing is unknown.
        """
        if timing not in TIMINGS:
            raise ValueError(f"`timing` must be 'pre' or 'post', got {timing!r}.")
        for entry in self._hooks.due(timing):
            # Before each, because a hook may clear gradients.
            self.fill_missing_grads()
            target = self if entry.group is None else self.part([self.param_groups[entry.group]])
            if entry.per_parameter:
                for parameter in target.moving_parameters():
                    entry.hook(target, parameter)
            else:
                entry.hook(target)

    def moving_parameters(self) -> list[Tensor]:
        """List the parameters that an update would move now: with a gradient and not frozen."""
        self.fill_missing_grads()
        moving = [group for group in self.param_groups if not group["frozen"]]
        return [weight for group in moving for weight in group["params"] if weight.grad is not None]

    def fill_missing_grads(self) -> None:
        """Give zeros to parameters without gradient in groups of ``missing_grad="zero"``.

        A parameter of a lazy module has no shape before its first forward, and stays as it is until then.
        """
        for group in self.param_groups:
            if group["missing_grad"] == "zero" and not group["frozen"]:
                for weight in group["params"]:
                    if weight.grad is None and weight.requires_grad and not is_lazy(weight):
                        weight.grad = torch.zeros_like(weight)

    def _move(self, advance: Callable[[], None]) -> None:
        """Do what `step` does when the gradients are there."""
        self.call_hooks("pre")
        advance()
        self.t += 1
        self.call_hooks("post")

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups, what is remembered per parameter, counters, hooks' state, loss scale, masters."""
        packed = super().state_dict()
        # Threads may have made the entries in any order; a saved state has one.
        state = {index: packed["state"][index] for index in sorted(packed["state"])}
        counters = {counter: getattr(self, counter) for counter in _COUNTERS}
        return {
            **packed,
            "state": state,
            **counters,
            "hooks": self._hooks.state_dict(),
            "loss_scale": None if self._scaler is None else self._scaler.state_dict(),
            "masters": None if self._masters is None else self._masters.saved_masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; nothing changes if it does not fit.

        Keys that torch's schedulers keep in the groups are taken over; other unknown ones are refused. Hooks
        of `register_load_state_dict_pre_hook` get the state first, and what they make of it must fit.

        Raises:
            StateError: Something is missing, unknown or of another shape, or comes from other hooks, another
                kind of loss scale, or an optimizer with masters where this has none.
        """
        state_dict = migrated(self, state_dict)
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
        own = {key: self.__dict__[key] for key in (*_COUNTERS, *_OWN)}
        return {**super().__getstate__(), **own}

    def __copy__(self: Self) -> Self:
        return self.part(self.param_groups)

    # Checks ----------------------------------------------------------------------------------

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse the options of a group that are out of range."""
        check_options(options)

    def _check_group(self, group: int | None) -> None:
        """Refuse the index of a group that is not there."""
        last = len(self.param_groups) - 1
        if group is not None and not 0 <= group <= last:
            raise ValueError(f"`group` must lie in 0..{last}, got {group}.")

    def _check_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state that was not written by an optimizer like this one."""
        wanted = {"state", "param_groups", "hooks", "loss_scale", "masters", *_COUNTERS}
        check_saved(saved, self.param_groups, wanted=wanted, options=self.defaults, state_keys=self.state_keys)
        self._hooks.check(saved["hooks"])
        self._check_precision(saved)
