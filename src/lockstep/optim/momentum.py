"""Momentum rules as functions of tensors, in the two forms that differ when the learning rate changes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lockstep.precision import HALF_PRECISION
from lockstep.strides import laid_out_for


def add_scaled_(targets: list[Tensor], sources: list[Tensor], scale: float | Tensor) -> None:
    """Add ``scale`` times each source to its target.

    In half precision on a CPU, torch's addition with a factor (``alpha``) rounds the last elements of a tensor,
    and of the part that each thread works on, differently from the others. This function rounds all elements
    alike, in float16 and bfloat16.

    Shapes: each list holds P tensors; the p-th of both have one shape, one dtype and one device.

    Args:
        targets: The tensors to add to; changed in place.
        sources: The tensors to add; left untouched.
        scale: The factor. If it is a tensor, `torch.compile` does not compile again when its value changes.

    Determinism: elementwise; in half precision product and sum are computed in float32 and rounded once.

    >>> target = torch.tensor([1.0])
    >>> add_scaled_([target], [torch.tensor([2.0])], 0.5)
    >>> target
    tensor([2.])
    """
    if isinstance(scale, Tensor) and torch.compiler.is_compiling():
        # As `alpha` the tensor would have to be converted to a Python number, which breaks the graph.
        scaled = torch._foreach_mul(sources, scale)  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        torch._foreach_add_(targets, scaled)
        return
    number = cast("float", scale)
    if not any(target.dtype in HALF_PRECISION and target.is_cpu for target in targets):
        torch._foreach_add_(targets, sources, alpha=number)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in HALF_PRECISION and target.is_cpu:
            # `addcmul_` rounds every element alike, unlike `add_`: it computes in float32 and rounds once.
            target.addcmul_(source, torch.ones((), dtype=target.dtype, device="cpu"), value=float(number))
        else:
            target.add_(source, alpha=number)


@torch.no_grad()
def momentum_step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Apply one step of momentum SGD whose velocity does not contain the learning rate.

    With weight w, velocity u, gradient g, learning rate η and momentum m::

        u ← m·u + g
        w ← w - η·u

    The other common form, `lr_momentum_step`, keeps η inside the velocity: v ← m·v + η·g, w ← w - v.
    The two agree as long as η is constant. When η changes, v must first be multiplied by new η over old η;
    u needs no such correction, because v = η·u at every step.

    Shapes: each list holds P tensors; the p-th of all three have one shape and one dtype.

    Args:
        weights: The weights, changed in place.
        velocities: The velocities, changed in place; zeros before the first step. With minus zeros, the
            neutral element of addition, the first velocity equals the gradient bit for bit, including its
            signed zeros.
        grads: The gradients of the mean loss over the whole batch; left untouched.
        lr: The learning rate η, at least 0. If it is a tensor, `torch.compile` does not compile again when
            its value changes.
        momentum: The momentum m in [0, 1): the fraction of the velocity that is kept in each step.
        dampening: The share of the gradient, in [0, 1], that does not enter the velocity.
        nesterov: Whether the weights move by η·(g + m·u) instead of η·u.

    Determinism: elementwise, so equal inputs yield equal bits on devices with the same rounding, however the
    tensors are split.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 3,
    equation 9.

    >>> weight, velocity = torch.tensor([1.0]), torch.tensor([0.0])
    >>> for lr in (0.5, 0.25):
    ...     momentum_step([weight], [velocity], [torch.tensor([1.0])], lr=lr, momentum=0.5)
    >>> weight, velocity
    (tensor([0.1250]), tensor([1.5000]))
    """
    if not weights:
        return
    _decay(velocities, momentum)
    if dampening == 0:
        torch._foreach_add_(velocities, grads)
    else:
        add_scaled_(velocities, grads, 1 - dampening)
    if not nesterov:
        add_scaled_(weights, velocities, -lr)
        return
    directions = [_materialized(grad).clone() for grad in grads]
    add_scaled_(directions, velocities, momentum)
    add_scaled_(weights, directions, -lr)


@torch.no_grad()
def fused_momentum_step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Apply `momentum_step` in one pass over memory, with torch's fused kernel.

    The kernel reads memory from the first element of each tensor on and ignores strides. A tensor that is not
    dense (a column of a larger tensor), or has other strides than its weight, is therefore updated in a copy.

    Shapes: as in `momentum_step`; all tensors have one dtype and are on one device.

    Args:
        weights: The weights, changed in place.
        velocities: The velocities, changed in place.
        grads: The gradients, which may be sparse; left untouched.
        lr: The learning rate η, at least 0.
        momentum: The momentum m, in [0, 1).
        weight_decay: The weight decay λ, at least 0; λ·w is added to the gradient first, see `add_weight_decay`.
        dampening: The share of the gradient that does not enter the velocity, see `momentum_step`.
        nesterov: Whether the weights move by η·(g + m·u), see `momentum_step`.

    Raises:
        ValueError: If the tensors are in half precision on a CPU.

    Determinism: the kernel may round m·u + g once where `momentum_step` rounds twice, and on a CPU it rounds
    the last elements of a tensor differently from the others. The bits depend on how tensors are split.

    >>> weight, velocity = torch.tensor([1.0]), torch.tensor([0.0])
    >>> for lr in (0.5, 0.25):
    ...     fused_momentum_step([weight], [velocity], [torch.tensor([1.0])], lr=lr, momentum=0.5)
    >>> weight, velocity
    (tensor([0.1250]), tensor([1.5000]))
    """
    if not weights:
        return
    check_fused_support(weights[0])
    if torch.compiler.is_compiling():
        # The compiler fuses on its own, and would treat the kernel's numbers as constants.
        grads = add_weight_decay(weights, grads, weight_decay)
        momentum_step(weights, velocities, grads, lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov)
        return
    if momentum == 0:
        # Without momentum the kernel takes no velocities; they must still hold what `momentum_step` would leave.
        torch._foreach_copy_(velocities, add_weight_decay(weights, grads, weight_decay))
    numbers: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    numbers |= {"dampening": dampening, "nesterov": nesterov}
    if all(map(_all_contiguous, weights, velocities, grads)):
        _run_fused_kernel(weights, velocities, grads, **numbers)
        return
    laid_weights = [laid_out_for(weight, weight) for weight in weights]
    laid_velocities = [laid_out_for(*pair) for pair in zip(weights, velocities, strict=True)]
    laid_grads = [laid_out_for(weight, _materialized(grad)) for weight, grad in zip(weights, grads, strict=True)]
    _run_fused_kernel(laid_weights, laid_velocities, laid_grads, **numbers)
    for original, laid in zip([*weights, *velocities], [*laid_weights, *laid_velocities], strict=True):
        if laid is not original:
            original.copy_(laid)


def _run_fused_kernel(
    weights: list[Tensor], velocities: list[Tensor], grads: list[Tensor], *, momentum: float, **numbers: Any
) -> None:
    """Run torch's fused kernel on dense tensors that have the strides of their weights."""
    numbers |= {"momentum": momentum, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(weights, grads, velocities if momentum != 0 else [], **numbers)


def _all_contiguous(weight: Tensor, velocity: Tensor, grad: Tensor) -> bool:
    """Return whether all three are contiguous: the usual case, which is cheap to check."""
    return (
        weight.is_contiguous()
        and velocity.is_contiguous()
        and grad.layout is torch.strided
        and grad.is_contiguous()
        # A tensor with the negative bit set is negated when it is read; the kernel reads memory as it is.
        and not grad.is_neg()
    )


def _materialized(grad: Tensor) -> Tensor:
    """Return a gradient whose values are dense in memory."""
    return grad.resolve_neg() if grad.layout is torch.strided else grad.to_dense()


def check_fused_support(weight: Tensor) -> None:
    """Check that torch's fused kernel computes correct results for a weight.

    In torch 2.13 its CPU version leaves garbage in bfloat16 and float16 velocities whose size is not a
    multiple of the vector width.

    Raises:
        ValueError: If the weight is in half precision on a CPU.
    """
    if weight.device.type == "cpu" and weight.dtype not in {torch.float32, torch.float64}:
        raise ValueError(f"`fused` must be False for weights on a CPU in half precision, got {weight.dtype}.")


@torch.no_grad()
def add_weight_decay(weights: list[Tensor], grads: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Return the gradients plus λ·w, the gradient of λ/2·‖w‖²; return the same list if λ is 0.

    Shapes: each list holds P tensors; the p-th of both have one shape, one dtype and one device.

    Args:
        weights: The weights; left untouched.
        grads: The gradients; left untouched. The result for a sparse gradient is dense.
        weight_decay: The weight decay λ, at least 0.

    Determinism: elementwise, so equal inputs yield equal bits, however the tensors are split.

    >>> add_weight_decay([torch.tensor([2.0])], [torch.tensor([1.0])], 0.25)
    [tensor([1.5000])]
    """
    if weight_decay == 0:
        return grads
    sums = [grad.clone() if grad.layout is torch.strided else grad.to_dense() for grad in grads]
    add_scaled_(sums, weights, weight_decay)
    return sums


@torch.no_grad()
def lr_momentum_step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float = 0.0,
    lookahead: float = 0.0,
) -> None:
    """Apply one step of momentum SGD whose velocity contains the learning rate.

    With weight w, velocity v, gradient g, learning rate η and momentum m::

        v ← m·v + η·g
        w ← w - v

    A change of η affects the existing part of v only as fast as that decays: the weights keep moving at the
    old rate for about 1/(1 - m) steps. `momentum_step` does not have this lag; here it disappears if m is
    multiplied by new η over old η in the step of the change.

    Shapes: each list holds P tensors; the p-th of all three have one shape and one dtype.

    Args:
        weights: The weights, changed in place.
        velocities: The velocities, changed in place; zeros before the first step.
        grads: The gradients; left untouched.
        lr: The learning rate η, at least 0.
        momentum: The momentum m, at least 0: the fraction of the velocity that is kept in each step.
        dampening: The share of the gradient, in [0, 1], that does not enter the velocity.
        lookahead: The momentum of Nesterov's rule, by which the weights move by m·v + η·g instead of v; 0 for v.

    Determinism: elementwise, so equal inputs yield equal bits on devices with the same rounding, however the
    tensors are split.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 3,
    equation 10 and the remark on momentum correction.

    >>> weight, velocity = torch.tensor([1.0]), torch.tensor([0.0])
    >>> for lr in (0.5, 0.25):
    ...     lr_momentum_step([weight], [velocity], [torch.tensor([1.0])], lr=lr, momentum=0.5)
    >>> weight, velocity
    (tensor([0.]), tensor([0.5000]))
    """
    if not weights:
        return
    add_to_lr_velocity(velocities, grads, lr=lr, momentum=momentum, dampening=dampening)
    if lookahead == 0:
        torch._foreach_sub_(weights, velocities)
        return
    directions = [velocity * lookahead for velocity in velocities]
    add_scaled_(directions, grads, lr)
    torch._foreach_sub_(weights, directions)


@torch.no_grad()
def add_to_lr_velocity(
    velocities: list[Tensor], grads: list[Tensor], *, lr: float | Tensor, momentum: float, dampening: float = 0.0
) -> None:
    """Apply the first half of `lr_momentum_step`, v ← m·v + η·g, and leave the weights unchanged.

    Args:
        velocities: The velocities, changed in place.
        grads: The gradients; left untouched.
        lr: The learning rate η, at least 0.
        momentum: The momentum m, at least 0.
        dampening: The share of the gradient, in [0, 1], that does not enter the velocity.
    """
    _decay(velocities, momentum)
    # Not multiplied by 1 - 0: a rate in a tensor must stay the same tensor for the compiler.
    add_scaled_(velocities, grads, lr if dampening == 0 else lr * (1 - dampening))


def _decay(velocities: list[Tensor], momentum: float) -> None:
    """Multiply the velocities by m in place; m = 0 clears them, so that an infinite velocity leaves no NaN."""
    if momentum == 0:
        torch._foreach_zero_(velocities)
        # Minus zero plus x equals x bit for bit, as if there had been no velocity.
        torch._foreach_neg_(velocities)
    else:
        torch._foreach_mul_(velocities, momentum)
