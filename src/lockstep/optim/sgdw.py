"""Momentum SGD whose weight decay stays out of the velocity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.hooked import check_lr_size, scalar
from lockstep.optim.momentum_sgd import MomentumSGD


class SGDW(MomentumSGD):
    """Step as `MomentumSGD`, and shrink the weights beside it.

    With weight w, velocity v, gradient g, learning rate η, its first value η₀, momentum m and decay λ::

        v ← m·v + η·g
        w ← (1 - λ·η/η₀)·w - v

    `lockstep.optim.hooks.WeightDecay` adds λ·w to the gradient instead, where it passes through the velocity
    and its share of a step is λ·η. Here it is λ while η is at its first value, and follows η from there.

    Args:
        params: Parameters, or dicts of groups with options of their own.
        lr: η, at least 0 and at the beginning above; with ``correction`` a plain number.
        momentum: m, in [0, 1).
        weight_decay: λ, in [0, 1).
        correction: Whether a change of η rescales the velocity, as in `MomentumSGD`.
        missing_grad: "skip" leaves a parameter without gradient alone, "zero" has momentum and decay move it.
        frozen: Whether the parameters stay as they are.

    A group's option ``initial_lr`` is η₀, by default its first ``lr``; torch's schedulers keep theirs by the
    same name.

    Raises:
        ValueError: An option is out of range.
        TypeError: ``lr`` is a tensor in a group with ``correction``.

    Determinism: elementwise, so the same bits wherever each parameter is stepped.

    References: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv:1711.05101,
    algorithm 1 (SGDW), with η/η₀ for its schedule multiplier.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SGDW([weight], lr=0.5, momentum=0.5, weight_decay=0.25)
    >>> for lr in (0.5, 0.25):
    ...     optimizer.lr = lr
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> weight.item(), optimizer.state[weight]["velocity"].item()
    (-0.28125, 0.5)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        *,
        correction: bool = False,
        missing_grad: str = "skip",
        frozen: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "initial_lr": None,
            "correction": correction,
            "missing_grad": missing_grad,
            "frozen": frozen,
        }
        # Past the constructor of MomentumSGD, which knows fewer options and does nothing else.
        super(MomentumSGD, self).__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters in, with options of their own.

        Args:
            param_group: "params" and any of the options; the others are those of the constructor.

        Raises:
            ValueError: An option is out of range.
            TypeError: ``lr`` is a tensor and ``correction`` is asked for.
        """
        super().add_param_group(param_group)
        first = _first_lr(param_group)
        # A copy, for a schedule may write to the tensor.
        param_group["initial_lr"] = first.clone() if isinstance(first, Tensor) else first

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_lr_size(options["lr"])
        first = _first_lr(options)
        if not 0 <= options["weight_decay"] < 1:
            raise ValueError(f"`weight_decay` must lie in [0, 1), got {options['weight_decay']}.")
        if not 0 < first < math.inf:
            raise ValueError(
                f"`initial_lr` must be finite and above 0, got {first}. The decay is λ times lr / initial_lr."
            )
        super()._check_options(options)

    def _coupled_decay(self, group: Mapping[str, Any]) -> float:  # noqa: ARG002 - none in any group
        """Give no decay that passes through the velocity: this one stays beside it."""
        return 0.0

    @torch.no_grad()
    def advance(self) -> None:
        """Shrink the weights, then move them one step by their gradients, and do nothing else."""
        self.fill_missing_grads()
        for group in self.param_groups:
            moving = [weight for weight in group["params"] if weight.grad is not None]
            if moving and group["weight_decay"] != 0 and not group["frozen"]:
                share = group["weight_decay"] * scalar(group["lr"]) / scalar(group["initial_lr"])
                # Not times 1 - share, which rounds a small share away.
                torch._foreach_sub_(moving, torch._foreach_mul(moving, share))  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        super().advance()


def _first_lr(options: Mapping[str, Any]) -> float | Tensor:
    """Give η₀: the rate of the beginning, unless the options say another."""
    first: float | Tensor = options["lr"] if options["initial_lr"] is None else options["initial_lr"]
    return first
