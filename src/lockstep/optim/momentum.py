"""Momentum as arithmetic on lists of tensors, in the two forms that part when the learning rate changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.optim.adding import add_scaled_
from lockstep.strides import laid_out_for


@torch.no_grad()
def momentum_step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
) -> None:
    """Move the weights one step along a velocity that is free of the learning rate.

    With weight w, velocity u, gradient g, learning rate η and momentum m::

        u ← m·u + g
        w ← w - η·u

    The other common form, `lr_momentum_step`, keeps η inside the velocity: v ← m·v + η·g, w ← w - v.
    The two agree while η stands still; when it changes, v must first be multiplied by new η over
    old η, and u needs no such correction, because v = η·u at every step.

    Shapes: each list holds P tensors; the p-th of all three have one shape and one dtype.

    Args:
        weights: Changed in place.
        velocities: Changed in place; zeros before the first step. Minus zeros, the neutral element
            of addition, make the first velocity the gradient to the bit, its signed zeros included.
        grads: Left untouched. Gradients of the mean loss over the whole batch.
        lr: η, at least 0. A tensor spares `torch.compile` a new compilation when it changes.
        momentum: m, the share of the velocity that outlives a step; in [0, 1).

    Determinism: elementwise, so equal bits in give equal bits out on devices that round alike,
    wherever the tensors are cut.

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
    torch._foreach_add_(velocities, grads)
    add_scaled_(weights, velocities, -lr)


@torch.no_grad()
def fused_momentum_step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float = 0.0,
) -> None:
    """Do the work of `momentum_step` in one pass over the memory, by torch's own fused kernel.

    The kernel reads memory from each tensor's first element on and looks at no strides. So what is not dense
    (a column of a larger tensor), or lies otherwise than its weight, is stepped in a copy.

    Shapes: as in `momentum_step`; all tensors are of one dtype and on one device.

    Args:
        weights: Changed in place.
        velocities: Changed in place.
        grads: Left untouched; may be sparse.
        lr: η, at least 0.
        momentum: m, in [0, 1).
        weight_decay: λ, at least 0; λ·w is added to the gradient first, see `decayed`.

    Raises:
        ValueError: The tensors are in half precision on a CPU.

    Determinism: the kernel may round m·u + g once where `momentum_step` rounds twice, and on a CPU
    the last elements of a tensor otherwise than the rest. The bits depend on where tensors are cut.

    >>> weight, velocity = torch.tensor([1.0]), torch.tensor([0.0])
    >>> for lr in (0.5, 0.25):
    ...     fused_momentum_step([weight], [velocity], [torch.tensor([1.0])], lr=lr, momentum=0.5)
    >>> weight, velocity
    (tensor([0.1250]), tensor([1.5000]))
    """
    if not weights:
        return
    check_fused(weights[0])
    if torch.compiler.is_compiling():
        # The compiler fuses on its own, and to it the kernel's numbers would be constants.
        grads = decayed(weights, grads, weight_decay)
        momentum_step(weights, velocities, grads, lr=lr, momentum=momentum)
        return
    if momentum == 0:
        torch._foreach_copy_(velocities, decayed(weights, grads, weight_decay))
    numbers: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    if all(map(_lie_alike, weights, velocities, grads)):
        _run_fused_kernel(weights, velocities, grads, **numbers)
        return
    laid_weights = [laid_out_for(weight, weight) for weight in weights]
    laid_velocities = [laid_out_for(*pair) for pair in zip(weights, velocities, strict=True)]
    laid_grads = [laid_out_for(weight, _plain(grad)) for weight, grad in zip(weights, grads, strict=True)]
    _run_fused_kernel(laid_weights, laid_velocities, laid_grads, **numbers)
    for own, laid in zip([*weights, *velocities], [*laid_weights, *laid_velocities], strict=True):
        if laid is not own:
            own.copy_(laid)


def _run_fused_kernel(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """Step dense tensors that have the strides of their weights."""
    torch._fused_sgd_(
        weights,
        grads,
        velocities if momentum != 0 else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _lie_alike(weight: Tensor, velocity: Tensor, grad: Tensor) -> bool:
    """Tell whether all lie row after row, the usual case, at little cost."""
    return (
        weight.is_contiguous()
        and velocity.is_contiguous()
        and grad.layout is torch.strided
        and grad.is_contiguous()
        and not grad.is_neg()
    )


def _plain(grad: Tensor) -> Tensor:
    """Give a gradient as dense numbers in memory."""
    return grad.resolve_neg() if grad.layout is torch.strided else grad.to_dense()


def check_fused(weight: Tensor) -> None:
    """Refuse weights that torch's fused kernel does not step rightly.

    In torch 2.13 its CPU version leaves garbage in velocities of bfloat16 and float16 whose size is no
    multiple of its vectors' width.

    Raises:
        ValueError: The weight is in half precision on a CPU.
    """
    if weight.device.type == "cpu" and weight.dtype not in {torch.float32, torch.float64}:
        raise ValueError(f"`fused` must be False for weights on a CPU in half precision, got {weight.dtype}.")


@torch.no_grad()
def decayed(weights: list[Tensor], grads: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Give the gradients plus λ times the weights, the gradient of λ/2·‖w‖²; themselves where λ is 0.

    Shapes: each list holds P tensors; the p-th of both have one shape, one dtype and one device.

    Args:
        weights: Left untouched.
        grads: Left untouched; may be sparse, where the sum is dense.
        weight_decay: λ, at least 0.

    Determinism: elementwise, so equal bits in give equal bits out, wherever the tensors are cut.

    >>> decayed([torch.tensor([2.0])], [torch.tensor([1.0])], 0.25)
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
) -> None:
    """Move the weights one step along a velocity that has the learning rate inside.

    With weight w, velocity v, gradient g, learning rate η and momentum m::

        v ← m·v + η·g
        w ← w - v

    A change of η reaches the old part of v only as fast as momentum forgets: the weights go on for
    about 1/(1 - m) steps at the old rate. `momentum_step` does not have this lag; here it goes away
    when m is multiplied by new η over old η for the step of the change.

    Shapes: each list holds P tensors; the p-th of all three have one shape and one dtype.

    Args:
        weights: Changed in place.
        velocities: Changed in place; zeros before the first step.
        grads: Left untouched.
        lr: η, at least 0.
        momentum: m, the share of the velocity that outlives a step; at least 0.

    Determinism: elementwise, so equal bits in give equal bits out on devices that round alike,
    wherever the tensors are cut.

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
    add_to_lr_velocity(velocities, grads, lr=lr, momentum=momentum)
    torch._foreach_sub_(weights, velocities)


@torch.no_grad()
def add_to_lr_velocity(velocities: list[Tensor], grads: list[Tensor], *, lr: float | Tensor, momentum: float) -> None:
    """Do the first half of `lr_momentum_step`, v ← m·v + η·g, and leave the weights alone.

    Args:
        velocities: Changed in place.
        grads: Left untouched.
        lr: η, at least 0.
        momentum: m, at least 0.
    """
    _decay(velocities, momentum)
    add_scaled_(velocities, grads, lr)


def _decay(velocities: list[Tensor], momentum: float) -> None:
    """Multiply the velocities by m; m = 0 clears them, so that an infinite one leaves no NaN behind."""
    if momentum == 0:
        torch._foreach_zero_(velocities)
        # Minus zero plus x is x to the bit, as if there had been no velocity.
        torch._foreach_neg_(velocities)
    else:
        torch._foreach_mul_(velocities, momentum)
