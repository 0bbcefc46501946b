"""Momentum SGD whose velocity contains the learning rate, with or without momentum correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.hooked import scalar
from lockstep.optim.momentum import add_to_lr_velocity, add_weight_decay, lr_momentum_step
from lockstep.optim.momentum_optimizer import MomentumOptimizer


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
        rows_by_lr: dict[float, list[tuple[Tensor, ...]]] = {}
        for row in zip(*lists, strict=True):
            # Not 0, from which a velocity could not be rescaled to another rate.
            old_lr = self.state[row[0]].setdefault("velocity_lr", lr or 1.0)
            rows_by_lr.setdefault(old_lr, []).append(row)
        for old_lr, rows in rows_by_lr.items():
            some_weights, some_velocities, some_grads = map(list, zip(*rows, strict=True))
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
