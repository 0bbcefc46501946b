"""Solvers of NNabla that torch does not have: LAMB, and momentum SGD with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.arguments import check_number
from lockstep.optim import HookedOptimizer, MomentumSGD, norms, rows_by, scalar


@torch.no_grad()
def lamb_step(
    weights: list[Tensor],
    means: list[Tensor],
    mean_squares: list[Tensor],
    grads: list[Tensor],
    *,
    count: int | None,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    norm_bounds: tuple[float, float],
    threshold: float,
) -> None:
    """Apply one step in Adam's direction, scaled by the norm of each parameter.

    With weight w, gradient g, means m and v of g and g², step t, learning rate η, decay λ, threshold θ, and
    φ(x) for x clamped to ``norm_bounds``::

        m ← β₁·m + (1 - β₁)·g
        v ← β₂·v + (1 - β₂)·g²
        u = (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε) + λ·w
        r = φ(‖w‖) / ‖u‖   where φ(‖w‖) > 0 and ‖u‖ > θ, else 1
        w ← w - η·r·u

    Shapes: each list holds P tensors; the p-th of all four have one shape and one dtype.

    Args:
        weights: The weights, changed in place.
        means: The means m of the gradients, changed in place; zeros before the first step.
        mean_squares: The means v of the squared gradients, changed in place; zeros before the first step.
        grads: The gradients of the mean loss over the whole batch; left untouched.
        count: The step t, counted from 1. None applies no bias correction: m and v are small in the first
            steps, which r largely compensates.
        lr: The learning rate η, at least 0.
        betas: The decay rates β₁ and β₂ of the means, in [0, 1).
        eps: The number ε that is added to the denominator, above 0.
        weight_decay: The weight decay λ, at least 0.
        norm_bounds: The smallest and the largest value of φ.
        threshold: The threshold θ for the norm of u, at least 0.

    Determinism: elementwise except for the norms, whose order of summation is a function of the shape (see
    `lockstep.optim.norm`). Nothing synchronizes with the device.

    References: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2.

    >>> weight, mean, mean_square = torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)
    >>> numbers = {"betas": (0.0, 0.0), "eps": 1e-6, "norm_bounds": (0.0, 10.0), "threshold": 0.0}
    >>> grad = torch.tensor([0.0, 8.0])
    >>> lamb_step([weight], [mean], [mean_square], [grad], count=1, lr=0.1, weight_decay=0.0, **numbers)
    >>> weight
    tensor([3.0000, 3.5000])
    """
    if not weights:
        return
    beta1, beta2 = betas
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(mean_squares, beta2)
    torch._foreach_addcmul_(mean_squares, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(mean_squares)  # noqa: SLF001 - torch's multi-tensor kernels have no other name
    if count is not None:
        torch._foreach_div_(roots, math.sqrt(1 - beta2**count))
    torch._foreach_add_(roots, eps)
    updates = torch._foreach_div(means, roots)  # noqa: SLF001 - see above
    if count is not None:
        torch._foreach_div_(updates, 1 - beta1**count)
    if weight_decay != 0:
        # Not with `alpha`, which on a CPU rounds the last elements of a half-precision tensor differently from
        # the others, so that the bits would depend on how many threads share the tensor.
        decays = torch._foreach_mul(weights, weight_decay)  # noqa: SLF001 - see above
        torch._foreach_add_(updates, decays)
    weight_norms = torch.stack(norms(weights)).clamp(*norm_bounds)
    update_norms = torch.stack(norms(updates))
    # `where` on the device in place of an `if`, which would wait for the norms.
    ratios = torch.where((weight_norms > 0) & (update_norms > threshold), weight_norms / update_norms, 1.0)
    torch._foreach_mul_(updates, list((ratios * lr).unbind()))
    torch._foreach_sub_(weights, updates)


class LAMB(HookedOptimizer):
    """The LAMB optimizer: Adam's direction, scaled by the norm of each parameter.

    The rule is that of `lamb_step`. Unless the norm exceeds its bounds, η is the fraction of its own norm that
    a parameter moves in a step. A parameter of zeros, and one whose update u is no longer than the threshold
    (as where gradients vanish), takes u unscaled: otherwise the former could never leave zero, and the latter
    would take a full step along noise.

    NNabla's Lamb has its epsilon for the threshold, (0, 10) for the bounds, and no bias correction; where its
    lower bound is 0, parameters of zeros stay zero forever, which is not reproduced here. MXNet's lamb has a
    threshold of 0.

    Args:
        params: The parameters to optimize, or dicts that define parameter groups with options of their own.
            They must be real and have dense gradients.
        lr: The learning rate η, at least 0.
        betas: The decay rates β₁ and β₂ of the means of the gradients and of their squares, in [0, 1).
        eps: The number ε that is added to the denominator, above 0.
        weight_decay: The weight decay λ, at least 0. It is part of u before that is scaled to its length, and
            therefore changes only the direction of a step.
        norm_bounds: The smallest and the largest value that a parameter's norm is clamped to, both at least 0.
        threshold: The threshold θ, at least 0. An update u whose norm is at most this is not scaled.
        bias_correction: Whether the means are divided by 1 - β₁ᵗ and 1 - β₂ᵗ, as their first t steps require.
        missing_grad: What happens to a parameter without a gradient: "skip" leaves it unchanged, "zero"
            applies the means to it.
        frozen: Whether the parameters are left unchanged.

    Raises:
        ValueError: If an option is out of range.
        TypeError: If a parameter is complex. `step` raises it if a gradient is sparse; no weight has moved then.

    Determinism: as `lamb_step`; the bits do not depend on where each parameter is updated.

    References: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2. The bounds are those of the paper's φ; the ratio of 1 is that of later
    implementations.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 8.0])
    >>> optimizer.step()
    >>> weight
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)
    """

    _state_names = ("mean", "mean_square")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        threshold: float = 1e-6,
        bias_correction: bool = True,
        missing_grad: str = "skip",
        frozen: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_bounds": norm_bounds,
            "threshold": threshold,
            "bias_correction": bias_correction,
            "missing_grad": missing_grad,
            "frozen": frozen,
        }
        super().__init__(params, defaults)

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys of a parameter's state: the means m and v, and the number of their steps."""
        return super().state_keys(group) | {"count"}

    def _check_parameters(self, group: Mapping[str, Any]) -> None:
        found = [weight.dtype for weight in group["params"] if weight.dtype.is_complex]
        if found:
            raise TypeError(f"`params` must be real, got one of {found[0]}.")

    @property
    def momentum(self) -> float:
        """The β₁ of the first group, in [0, 1). You can set it."""
        beta1: float = self.param_groups[0]["betas"][0]
        return beta1

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._set_option("betas", (momentum, self.param_groups[0]["betas"][1]))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
            check_number(name, beta, least=0, below=1)
        check_number("eps", options["eps"], above=0, finite=True)
        check_number("weight_decay", options["weight_decay"], least=0, finite=True)
        check_number("threshold", options["threshold"], least=0, finite=True)
        least, greatest = options["norm_bounds"]
        if not (0 <= least <= greatest and least < math.inf and greatest > 0):
            rule = "must be at least 0 and in ascending order, the second above 0"
            raise ValueError(f"`norm_bounds` {rule}, got {(least, greatest)}.")

    def advance(self) -> None:
        """Apply one step to the weights; no hook is called and nothing is counted.

        The state belongs to single parameters, so each `part` may advance in a thread of its own.

        Raises:
            TypeError: If a gradient is sparse; no weight has moved then.
        """
        # All groups before the first moves, so that an error leaves every weight as it was.
        for weight in self.moving_parameters():
            # The means of a sparse gradient would be dense.
            if weight.grad is not None and weight.grad.layout != torch.strided:
                raise TypeError(
                    f"The gradients of LAMB must be dense, got one of layout {weight.grad.layout} for a "
                    f"parameter of shape {tuple(weight.shape)}. Use another optimizer for such parameters, "
                    "or have their layer compute dense gradients (sparse=False)."
                )
        super().advance()

    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        names = ("lr", "betas", "eps", "weight_decay", "norm_bounds", "threshold")
        numbers = {name: group[name] for name in names}
        for weight in lists[0]:
            self.state[weight]["count"] += 1
        for count, some in rows_by(lambda weight: self.state[weight]["count"], *lists).items():
            lamb_step(*some, count=count if group["bias_correction"] else None, **numbers)

    def _init_state(self, state: dict[str, Any], weight: Tensor) -> None:
        super()._init_state(state, weight)
        state["count"] = 0


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
        check_number("weight_decay", options["weight_decay"], least=0, below=1)
        # The decay is λ times lr / initial_lr.
        check_number("initial_lr", first, above=0, finite=True)

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
