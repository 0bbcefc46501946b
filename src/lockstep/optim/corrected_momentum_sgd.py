"""Momentum SGD whose velocity does not contain the learning rate, so that schedules take effect at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.hooked import scalar
from lockstep.optim.momentum import add_weight_decay, check_fused_support, fused_momentum_step, momentum_step
from lockstep.optim.momentum_optimizer import MomentumOptimizer


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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: A dict of "params" and any options; missing options take the constructor's values.

        Raises:
            ValueError: If an option is out of range, or ``fused`` is set for half precision on a CPU.
        """
        super().add_param_group(param_group)
        if not self.param_groups[-1]["fused"]:
            return
        # The group is checked after it was added, because torch accepts "params" in several forms until then.
        try:
            for weight in self.param_groups[-1]["params"]:
                check_fused_support(weight)
        except ValueError:
            del self.param_groups[-1]
            raise

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
