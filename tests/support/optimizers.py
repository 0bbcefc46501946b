"""Parameters and gradients for the tests of optimizers, and their comparison by bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SHAPES = [(3, 5), (), (65,), (2, 0, 3), (4, 3, 2)]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Create parameters of several shapes, always with the same values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def adagrad_takes_flags() -> bool:
    """Return whether the fused Adagrad of this torch can be skipped by a flag on the device; that of 2.11 cannot."""
    optimizer = torch.optim.Adagrad(parameters(), fused=True)
    return bool(vars(optimizer).get("_step_supports_amp_scaling", False))


def put_grads(weights: Sequence[torch.nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    """Set the gradients of a step; those of the parameters with the missing indices are None."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, weight in enumerate(weights):
        grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.grad = None if index in missing else grad


def put_cut_grads(weights: Sequence[torch.nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    """Set gradients of which half are cut to zeros of either sign, as behind a ReLU.

    The signs of zeros are bits too. A gradient of nothing but zeros has no direction, which some optimizers need.
    """
    put_grads(weights, step, missing)
    for weight in weights:
        weight.grad = None if weight.grad is None else weight.grad * (weight.grad > 0)


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of tensors, which are equal only if all bits are."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def same_bits(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Compare tensors by their bits."""
    return bits(ours) == bits(theirs)
