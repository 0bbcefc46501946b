"""Momentum SGD with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim import MomentumSGD, scalar


class SGDW(MomentumSGD):
    """Momentum SGD, as `MomentumSGD`, with a weight decay that bypasses the velocity.

    With weight w, velocity v, gradient g, learning rate η, its initial value η₀, momentum m and decay λ::

        v ← m·v + η·g
        w ← (1 - λ·η/η₀)·w - v

    `lockstep.optim.hooks.WeightDecay` adds λ·w to the gradient instead, so that the decay passes through the
    velocity and shrinks the weights by λ·η per step. Here the decay per step is λ while η has its initial
    value, and is scaled with η when that changes.

    Args:
        params: The parameters to optimize, or dicts that define parameter groups with options of their own.
        lr: The learning rate η, at least 0, and above 0 at the start; a plain number with ``correction``.
        momentum: The momentum m, in [0, 1).
        weight_decay: The weight decay λ, in [0, 1).
        **options: The other options of `MomentumSGD`; with ``missing_grad="zero"``, the decay applies to a parameter
            without a gradient, too.

    The option ``initial_lr`` of a group is η₀, by default its first ``lr``; torch's schedulers store the
    initial learning rate under the same name.

    Raises:
        ValueError: If an option is out of range.
        TypeError: If ``lr`` is a tensor in a group with ``correction``.

    Determinism: elementwise, so the bits do not depend on where each parameter is updated.

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
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay, **options)
        # Not earlier, because the constructors of torch and of `MomentumSGD` collect the defaults. Saved states must
        # have it.
        self.defaults["initial_lr"] = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: A dict of "params" and any options; missing options take the constructor's values.

        Raises:
            ValueError: If an option is out of range.
            TypeError: If ``lr`` is a tensor and ``correction`` is True.
        """
        super().add_param_group(param_group)
        first = _initial_lr(param_group)
        # A copy, because a schedule may write to the tensor in place.
        param_group["initial_lr"] = first.clone() if isinstance(first, Tensor) else first

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        first = _initial_lr(options)
        if options["weight_decay"] >= 1:
            raise ValueError(f"`weight_decay` must lie in [0, 1), got {options['weight_decay']}.")
        if not 0 < first < math.inf:
            raise ValueError(
                f"`initial_lr` must be finite and above 0, got {first}. The decay is λ times lr / initial_lr."
            )

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state of this optimizer; not one for that of torch's SGD, which has the decay in its buffers."""
        return super()._converted(state_dict) if "t" in state_dict else state_dict

    def _coupled_decay(self, group: Mapping[str, Any]) -> float:  # noqa: ARG002 - none in any group
        """Return 0: no decay passes through the velocity."""
        return 0.0

    @torch.no_grad()
    def advance(self) -> None:
        """Decay the weights, then apply one step; no hook is called and nothing is counted."""
        self.fill_missing_grads()
        for group in self.param_groups:
            moving = [weight for weight in group["params"] if weight.grad is not None]
            if moving and group["weight_decay"] != 0 and not group["frozen"]:
                share = group["weight_decay"] * scalar(group["lr"]) / scalar(group["initial_lr"])
                # Not a multiplication by 1 - share, which would round a small share away.
                torch._foreach_sub_(moving, torch._foreach_mul(moving, share))  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        super().advance()


def _initial_lr(options: Mapping[str, Any]) -> float | Tensor:
    """Return η₀: the option ``initial_lr`` where it is set, otherwise the current learning rate."""
    first: float | Tensor = options["lr"] if options.get("initial_lr") is None else options["initial_lr"]
    return first
