"""Momentum SGD whose velocity is free of the learning rate, so that schedules act at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.hooked import ForeachOptimizer, scalar
from lockstep.optim.momentum import check_fused, decayed, fused_momentum_step, momentum_step


class CorrectedMomentumSGD(ForeachOptimizer):
    """Step along a velocity that a change of the learning rate leaves alone.

    With weight w, velocity u, gradient g (plus λ·w with a weight decay λ), learning rate η and momentum m::

        u ← m·u + g
        w ← w - η·u

    `MomentumSGD` keeps η inside the velocity. That v = η·u: put v into its rule, with the correction
    that a new η asks for, and the rule above comes out::

        v' = m·(η'/η)·v + η'·g = η'·(m·u + g) = η'·u'

    It steps as ``torch.optim.SGD(momentum=m, weight_decay=λ)`` does, to the bit, and adds hooks, counters,
    Chainer's treatment of missing gradients and a state that refuses strangers. In bfloat16 and float16 on a
    CPU it has one rounding for all elements (`add_scaled_`), where torch's depends on the number of threads.

    Args:
        params: Parameters, or dicts of groups with options of their own.
        lr: η, at least 0; a tensor spares `torch.compile` a new compilation when it changes.
        momentum: m, in [0, 1).
        weight_decay: λ, at least 0. λ·w is added to the gradient before it meets the velocity, as in
            ``torch.optim.SGD``; `SGDW` keeps it out of there.
        missing_grad: "skip" leaves a parameter without gradient alone, "zero" has momentum move it.
        frozen: Whether the parameters stay as they are.
        fused: Whether one kernel does both lines in one pass, as in
            ``torch.optim.SGD(fused=True)``. Faster; its bits depend on how tensors are cut.

    Raises:
        ValueError: An option is out of range.

    Determinism: elementwise, so the same bits wherever each parameter is stepped.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 3,
    equation 9. Chainer's optimizer of this name keeps -u.

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
        missing_grad: str = "skip",
        frozen: bool = False,
        fused: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "missing_grad": missing_grad,
            "frozen": frozen,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters in, with options of their own.

        Args:
            param_group: "params" and any of the options; the others are those of the constructor.

        Raises:
            ValueError: An option is out of range, or ``fused`` meets half precision on a CPU.
        """
        super().add_param_group(param_group)
        if not self.param_groups[-1]["fused"]:
            return
        try:
            for weight in self.param_groups[-1]["params"]:
                check_fused(weight)
        except ValueError:
            del self.param_groups[-1]
            raise

    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        weights, velocities, grads = lists
        lr, momentum, decay = scalar(group["lr"]), group["momentum"], group["weight_decay"]
        if group["fused"]:
            fused_momentum_step(*lists, lr=lr, momentum=momentum, weight_decay=decay)
        else:
            momentum_step(weights, velocities, decayed(weights, grads, decay), lr=lr, momentum=momentum)

    def _begin(self, state: dict[str, Any], weight: Tensor) -> None:
        # Minus zeros: see `momentum_step`.
        state["velocity"] = torch.zeros_like(weight).neg_()
