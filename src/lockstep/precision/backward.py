"""Begin backward with a factor that the format of the loss may not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.precision.finite import sent
from lockstep.precision.masters import HALF_PRECISION


def first_gradient(loss: Tensor, factor: float | Tensor) -> tuple[Tensor | None, float | Tensor | None]:
    """Give what backward begins with to compute the gradient of factor times loss.

    A loss in half precision can begin with few numbers: 257 becomes 256 in bfloat16. So its backward begins
    with the power of two at or below the factor, and the rest multiplies the gradients that come out.

    Args:
        loss: One element.
        factor: Positive; a number, or 0-d and float64 on any device.

    Returns:
        The first gradient, None for torch's own of 1; and the rest, at least 1 and below 2, or None for 1.

    Determinism: nothing is rounded but the factor, to the loss's format if that is no half.

    >>> first_gradient(torch.tensor(0.5, dtype=torch.bfloat16), 257.0)
    (tensor(256., dtype=torch.bfloat16), 1.00390625)
    """
    rest: float | Tensor | None = None
    if loss.dtype in HALF_PRECISION:
        factor, rest = _split(factor)
    if isinstance(factor, Tensor):
        return sent(factor, loss.device).to(loss.dtype).reshape(loss.shape), rest
    if factor == 1.0 and loss.dim() == 0:
        return None, rest
    return torch.full_like(loss, factor), rest


def multiply_(gradients: Sequence[Tensor | None], rest: float | Tensor) -> None:
    """Multiply gradients by the rest of a factor, in place."""
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(sent(rest, gradient.device) if isinstance(rest, Tensor) else rest)


def _split(factor: float | Tensor) -> tuple[float | Tensor, float | Tensor | None]:
    """Split a factor into a power of two and a rest; both are exact."""
    if isinstance(factor, Tensor):
        rest = torch.frexp(factor).mantissa * 2.0
        return factor / rest, rest
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(1.0, exponent - 1), None if mantissa == 0.5 else mantissa * 2.0  # noqa: PLR2004 - of a power of two
