"""Start backward with a factor that the number format of the loss may not be able to hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.precision.finite import to_device
from lockstep.precision.masters import HALF_PRECISION


def initial_gradient(
    loss: Tensor, factor: float | Tensor, weight: float = 1.0, total: float = 1.0
) -> tuple[Tensor | None, float | Tensor | None]:
    """Return the gradient with which backward starts, to compute that of loss · factor · weight / total.

    Half precision holds few numbers: in bfloat16 a first gradient of 257 would become 256. For a loss in half
    precision, backward therefore starts with the largest power of two that is not above the factor, times the number
    of that format that is nearest to weight / total. You must multiply the resulting gradients by the rest.

    Args:
        loss: The loss, a tensor of one element.
        factor: The factor, which must be positive: a number, or a 0-d float64 tensor on any device.
        weight: The weight of the loss in a mean, above 0.
        total: The sum of the weights of all losses in this mean.

    Returns:
        The first gradient, or None for a gradient of 1; and the rest, or None for 1.

    Determinism: nothing is rounded but the product, to the format of the loss unless that is half precision.

    >>> initial_gradient(torch.tensor(0.5, dtype=torch.bfloat16), 257.0)
    (tensor(256., dtype=torch.bfloat16), 1.00390625)
    >>> initial_gradient(torch.tensor(0.5, dtype=torch.bfloat16), 1.0, weight=4, total=12)
    (tensor(0.3340, dtype=torch.bfloat16), 0.9980506822612085)
    """
    rest: float | Tensor | None = None
    if loss.dtype in HALF_PRECISION:
        factor, rest = _split(factor)
        share = weight / total
        mantissa, exponent = math.frexp(share)
        spacing = torch.finfo(loss.dtype).eps / 2
        nearest = math.ldexp(round(mantissa / spacing) * spacing, exponent)
        if nearest != share:
            rest = share / nearest * (1.0 if rest is None else rest)
            weight, total = nearest, 1.0
    factor = factor * weight / total
    if isinstance(factor, Tensor):
        return to_device(factor, loss.device).to(loss.dtype).reshape(loss.shape), rest
    # None saves the creation of a tensor in the usual case.
    if factor == 1.0 and loss.dim() == 0:
        return None, rest
    return torch.full_like(loss, factor), rest


def multiply_(gradients: Sequence[Tensor | None], rest: float | Tensor) -> None:
    """Multiply gradients by the rest of a factor.

    Args:
        gradients: The gradients, or None for missing ones. Changed in place.
        rest: The rest, as `initial_gradient` returned it.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(to_device(rest, gradient.device) if isinstance(rest, Tensor) else rest)


def _split(factor: float | Tensor) -> tuple[float | Tensor, float | Tensor | None]:
    """Split a factor into a power of two and a rest in [1, 2), without rounding."""
    if isinstance(factor, Tensor):
        # A comparison with 1 would wait for the device, so gradients are multiplied by a rest of 1 as well.
        rest = torch.frexp(factor).mantissa * 2.0
        return factor / rest, rest
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(1.0, exponent - 1), None if mantissa == 0.5 else mantissa * 2.0  # noqa: PLR2004 - of a power of two
