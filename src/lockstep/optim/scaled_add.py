"""Add scaled tensors in place, with bits that do not depend on how the tensors are split."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

HALF_PRECISION_DTYPES: Final = frozenset({torch.bfloat16, torch.float16})


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
    if not any(target.dtype in HALF_PRECISION_DTYPES and target.is_cpu for target in targets):
        torch._foreach_add_(targets, sources, alpha=number)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in HALF_PRECISION_DTYPES and target.is_cpu:
            # `addcmul_` rounds every element alike, unlike `add_`: it computes in float32 and rounds once.
            target.addcmul_(source, torch.ones((), dtype=target.dtype, device="cpu"), value=float(number))
        else:
            target.add_(source, alpha=number)
