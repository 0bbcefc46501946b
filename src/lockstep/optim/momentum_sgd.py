"""Momentum SGD with the learning rate inside of the velocity or outside, and the options of torch's SGD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.arguments import check_number
from lockstep.errors import warn
from lockstep.optim.hooked_optimizer import HookedOptimizer
from lockstep.optim.momentum import (
    add_to_lr_velocity,
    add_weight_decay,
    check_fused_support,
    fused_momentum_step,
    lr_momentum_step,
    momentum_step,
)
from lockstep.optim.options import rows_by, scalar, unknown_options

TORCH_OPTIONS: Final = {"dampening": 0.0, "nesterov": False, "maximize": False}
"""The options of ``torch.optim.SGD`` beside those that every momentum optimizer has, with their defaults."""

_KEPT: Final = ("missing_grad", "frozen", "correction")
"""Options that torch's SGD does not have, which keep their values when its state is loaded."""


class MomentumOptimizer(HookedOptimizer):
    """A momentum optimizer with the options ``dampening``, ``nesterov`` and ``maximize`` of torch's SGD.

    A subclass implements the arithmetic in `_advance_rows`, and `_velocity` if its velocity is not torch's.
    """

    is_elementwise = True

    # Set before the velocities of a step exist: the first gradient enters a velocity undampened, as in torch.
    _fresh: frozenset[int] = frozenset()

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        dampening = options.get("dampening", 0)
        check_number("dampening", dampening)
        if not 0 <= dampening <= 1:
            raise ValueError(f"`dampening` must lie in [0, 1], got {dampening}.")
        if options.get("nesterov") and (options["momentum"] == 0 or dampening != 0):
            raise ValueError(
                "`nesterov` must be used with a momentum above 0 and without dampening, got "
                f"momentum={options['momentum']} and dampening={dampening}."
            )

    def advance(self) -> None:
        """Apply one step to the weights; see `HookedOptimizer.advance`."""
        for group in self.param_groups:
            if group.get("dampening"):
                self._advance_eagerly()
                return
        super().advance()

    # The compiler calls `_init_group` only when it compiles: what is fresh in that step would be so in all later ones.
    # `torch.compiler.disable` would load the compiler when lockstep is imported; this form, which torch's own
    # optimizers use, loads it at the first call.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _advance_eagerly(self) -> None:
        super().advance()

    def _init_group(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], *states: list[Tensor]
    ) -> None:
        if group.get("dampening"):
            first = [each for each in group["params"] if "velocity" not in self.state.get(each, {})]
            self._fresh = frozenset(map(id, first))
        super()._init_group(group, weights, grads, *states)

    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        weights, velocities, grads = lists
        if group.get("maximize"):
            grads = [-grad for grad in grads]
        # As in torch, dampening has no effect without momentum.
        dampening = group.get("dampening", 0.0) if group["momentum"] else 0.0
        if not dampening:
            self._advance_rows(group, weights, velocities, grads, dampening=0.0)
            return
        for is_fresh, some in rows_by(lambda each: id(each) in self._fresh, weights, velocities, grads).items():
            self._advance_rows(group, *some, dampening=0.0 if is_fresh else dampening)

    @abstractmethod
    def _advance_rows(self, group: dict[str, Any], *lists: list[Tensor], dampening: float) -> None:
        """Apply a step.

        Args:
            group: The parameter group whose options apply.
            *lists: The weights, the velocities, and the gradients, which are negated for maximization.
            dampening: The dampening of these velocities.
        """

    def _velocity(self, buffer: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - see subclasses
        """Return the state of a parameter, given the momentum buffer of torch's SGD and the options of its group."""
        return {"velocity": buffer.clone()}

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state of this optimizer for one of torch's SGD, and any other with the options that it lacks."""
        # The group comes first as well, so that its keys keep their order.
        saved = state_dict["param_groups"] if state_dict.keys() >= {"state", "param_groups"} else []
        groups = [{**group, **TORCH_OPTIONS, **group} for group in saved]
        if "t" in state_dict or not groups or not all({"foreach", "dampening"} <= group.keys() for group in saved):
            # A state that was saved before these options existed was saved by a run with their defaults.
            return {**state_dict, "param_groups": groups} if groups else state_dict
        options_of: dict[int, Mapping[str, Any]] = {}
        for own, group in zip(self.param_groups, groups, strict=False):
            group.update({name: own[name] for name in _KEPT if name in own})
            if "fused" in group:
                group["fused"] = bool(group["fused"])
            for option in unknown_options(group, self.defaults):
                del group[option]
            options_of.update(dict.fromkeys(group["params"], group))
        buffers = {index: each.get("momentum_buffer") for index, each in state_dict["state"].items()}
        warn(
            f"The loaded state is that of torch.optim.SGD. Its momentum buffers become the velocities of this "
            f"{type(self).__name__}; hooks, counters and the loss scale keep their state."
        )
        return {
            **self.state_dict(),
            "param_groups": groups,
            "state": {
                index: self._velocity(buffer, options_of[index])
                for index, buffer in buffers.items()
                if buffer is not None and index in options_of
            },
        }


class MomentumSGD(MomentumOptimizer):
    """Momentum SGD whose velocity contains the learning rate.

    With weight w, velocity v, gradient g (plus λ·w with a weight decay λ), learning rate η and momentum m::

        v ← m·v + η·g
        w ← w - v

    When η changes, the existing part of v keeps the old rate for about 1/(1 - m) steps. With
    ``correction=True`` it is rescaled to the new rate in the step of the change, and the weights
    equal those of `CorrectedMomentumSGD` up to rounding::

        v ← m·(new η / old η)·v + η·g

    While η is 0 the weights do not move, and the velocity is updated with the last rate other than 0 (with 1
    if there was none), because a velocity of zeros could not be rescaled to any other rate.

    Args:
        params: The parameters to optimize, or dicts that define parameter groups with options of their own.
        lr: The learning rate η, at least 0; a plain number with ``correction``, which compares it with the
            previous one on the host.
        momentum: The momentum m, in [0, 1).
        weight_decay: The weight decay λ, at least 0. λ·w is added to the gradient before the velocity is
            updated, as in ``torch.optim.SGD``; `lockstep.compat.nnabla.SGDW` keeps
            the decay out of the velocity.
        dampening: The share of each gradient but the first, in [0, 1], that does not enter the velocity; as in
            ``torch.optim.SGD``, it has no effect without momentum.
        nesterov: Whether the weights move along the velocity that the next step would have with the same gradient.
        maximize: Whether the weights move along the gradient instead of against it.
        correction: Whether the velocity is rescaled when η changes.
        missing_grad: What happens to a parameter without a gradient: "skip" leaves it unchanged, "zero"
            applies momentum to it.
        frozen: Whether the parameters are left unchanged.

    Raises:
        ValueError: If an option is out of range.
        TypeError: If ``lr`` is a tensor in a group with ``correction``.

    Determinism: elementwise, so the bits do not depend on where each parameter is updated.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 3,
    equation 10 and the remark on momentum correction. Chainer's optimizer of this name stores -v.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = MomentumSGD([weight], lr=0.5, momentum=0.5, correction=True)
    >>> for lr in (0.5, 0.25):
    ...     optimizer.lr = lr
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> weight.item(), optimizer.state[weight]["velocity"].item(), optimizer.t
    (0.125, 0.375, 2)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        correction: bool = False,
        missing_grad: str = "skip",
        frozen: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dampening": dampening}
        choices = {"nesterov": nesterov, "maximize": maximize, "missing_grad": missing_grad, "frozen": frozen}
        super().__init__(params, {**numbers, **choices, "correction": correction})

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys of a parameter's state: the velocity v and, with correction, the η it contains."""
        return super().state_keys(group) | ({"velocity_lr"} if group["correction"] else set())

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        if options["correction"] and isinstance(options["lr"], Tensor):
            raise TypeError("`lr` must be a plain number with `correction`, got a tensor.")

    def _advance_rows(self, group: dict[str, Any], *lists: list[Tensor], dampening: float) -> None:
        weights, velocities, grads = lists
        step: Any = self._corrected_step if group["correction"] else lr_momentum_step
        grads = add_weight_decay(weights, grads, self._coupled_decay(group))
        lookahead = group["momentum"] if group.get("nesterov") else 0.0
        options = {"dampening": dampening, "lookahead": lookahead}
        step(weights, velocities, grads, lr=scalar(group["lr"]), momentum=group["momentum"], **options)

    def _velocity(self, buffer: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        # Torch's buffer does not contain the rate: v = η·u. With a rate of 0 the velocity is that for 1, see above.
        lr = group["lr"] or 1.0
        state: dict[str, Any] = {"velocity": buffer * lr}
        return {**state, "velocity_lr": lr} if group["correction"] else state

    def _coupled_decay(self, group: Mapping[str, Any]) -> float:
        """Return the weight decay that passes through the velocity."""
        return cast("float", group["weight_decay"])

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        super()._init_group(group, *lists)
        if not group["correction"]:
            # Correction may have been turned off. The rate would be out of date when it is turned on again, and
            # a saved state with it would not load.
            for weight in lists[0]:
                self.state[weight].pop("velocity_lr", None)

    def _corrected_step(self, *lists: list[Tensor], lr: float, momentum: float, **options: float) -> None:
        """Apply a step, grouped by the rate inside the velocities, which differs where steps were skipped."""
        # Not 0, from which a velocity could not be rescaled to another rate.
        by_lr = rows_by(lambda weight: self.state[weight].setdefault("velocity_lr", lr or 1.0), *lists)
        for old_lr, (some_weights, some_velocities, some_grads) in by_lr.items():
            if lr == 0:
                add_to_lr_velocity(
                    some_velocities, some_grads, lr=old_lr, momentum=momentum, dampening=options["dampening"]
                )
                continue
            # The quotient comes first: it is exactly 1 while the rate is constant, and changes no bit then.
            rescaled = momentum * (lr / old_lr)
            lr_momentum_step(some_weights, some_velocities, some_grads, lr=lr, momentum=rescaled, **options)
            for weight in some_weights:
                self.state[weight]["velocity_lr"] = lr


class CorrectedMomentumSGD(MomentumOptimizer):
    """Momentum SGD whose velocity is not affected by a change of the learning rate.

    With weight w, velocity u, gradient g (plus λ·w with a weight decay λ), learning rate η and momentum m::

        u ← m·u + g
        w ← w - η·u

    `MomentumSGD` keeps η inside its velocity v = η·u. Inserting v into its rule, with the correction that a
    new η requires, yields the rule above::

        v' = m·(η'/η)·v + η'·g = η'·(m·u + g) = η'·u'

    The steps are those of ``torch.optim.SGD(momentum=m, weight_decay=λ)``, bit for bit; in addition there are
    hooks, counters, Chainer's treatment of missing gradients, and a saved state that is checked when it is
    loaded. In bfloat16 and float16 on a CPU all elements are rounded alike (see `add_scaled_`), whereas the
    rounding of torch's optimizer depends on the number of threads.

    Args:
        params: The parameters to optimize, or dicts that define parameter groups with options of their own.
        lr: The learning rate η, at least 0. If it is a tensor, `torch.compile` does not compile again when
            its value changes.
        momentum: The momentum m, in [0, 1).
        weight_decay: The weight decay λ, at least 0. λ·w is added to the gradient before the velocity is
            updated, as in ``torch.optim.SGD``; `lockstep.compat.nnabla.SGDW` keeps
            the decay out of the velocity.
        dampening: The share of each gradient but the first, in [0, 1], that does not enter the velocity; as in
            ``torch.optim.SGD``, it has no effect without momentum.
        nesterov: Whether the weights move along the velocity that the next step would have with the same gradient.
        maximize: Whether the weights move along the gradient instead of against it.
        missing_grad: What happens to a parameter without a gradient: "skip" leaves it unchanged, "zero"
            applies momentum to it.
        frozen: Whether the parameters are left unchanged.
        fused: Whether one kernel computes both lines in one pass, as in ``torch.optim.SGD(fused=True)``.
            It is faster, but its bits depend on how tensors are split.

    Raises:
        ValueError: If an option is out of range.

    Determinism: elementwise, so the bits do not depend on where each parameter is updated.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 3,
    equation 9. Chainer's optimizer of this name stores -u.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = CorrectedMomentumSGD([weight], lr=0.5, momentum=0.5)
    >>> for lr in (0.5, 0.25):
    ...     optimizer.lr = lr
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> weight.item(), optimizer.state[weight]["velocity"].item(), optimizer.t
    (0.125, 1.5, 2)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        missing_grad: str = "skip",
        frozen: bool = False,
        fused: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dampening": dampening}
        choices = {"nesterov": nesterov, "maximize": maximize, "missing_grad": missing_grad, "frozen": frozen}
        super().__init__(params, {**numbers, **choices, "fused": fused})

    def _check_parameters(self, group: Mapping[str, Any]) -> None:
        for weight in group["params"] if group["fused"] else ():
            check_fused_support(weight)

    def _advance_rows(self, group: dict[str, Any], *lists: list[Tensor], dampening: float) -> None:
        weights, velocities, grads = lists
        decay = group["weight_decay"]
        numbers = {"lr": scalar(group["lr"]), "momentum": group["momentum"]}
        options = {"dampening": dampening, "nesterov": group["nesterov"]}
        if group["fused"]:
            fused_momentum_step(weights, velocities, grads, **numbers, weight_decay=decay, **options)
        else:
            momentum_step(weights, velocities, add_weight_decay(weights, grads, decay), **numbers, **options)

    def _init_state(self, state: dict[str, Any], weight: Tensor) -> None:
        # Minus zeros, so that the first velocity keeps the signed zeros of the gradient; see `momentum_step`.
        state["velocity"] = torch.zeros_like(weight).neg_()
