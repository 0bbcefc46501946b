"""Add tensors times a number, with bits that do not depend on where the tensors are cut."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

HALVES: Final = frozenset({torch.bfloat16, torch.float16})


def add_scaled_(targets: list[Tensor], sources: list[Tensor], scale: float | Tensor) -> None:
    """Add the sources times a number.

    In half precision on a CPU, torch's addition with a factor rounds the last elements of a tensor, and of
    each thread's part of it, otherwise than the rest, in float16 and bfloat16 alike.

    Shapes: each list holds P tensors; the p-th of both have one shape, one dtype and one device.

    Args:
        targets: Changed in place.
        sources: Left untouched.
        scale: The number. A tensor spares `torch.compile` a new compilation when it changes.

    Determinism: elementwise; in half precision product and sum are made in float32 and rounded once.

    >>> target = torch.tensor([1.0])
    >>> add_scaled_([target], [torch.tensor([2.0])], 0.5)
    >>> target
    tensor([2.])
    """
    if isinstance(scale, Tensor) and torch.compiler.is_compiling():
        # As `alpha` the tensor would have to become a Python number, which ends the graph.
        scaled = torch._foreach_mul(sources, scale)  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        torch._foreach_add_(targets, scaled)
        return
    number = cast("float", scale)
    if not any(target.dtype in HALVES and target.is_cpu for target in targets):
        torch._foreach_add_(targets, sources, alpha=number)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in HALVES and target.is_cpu:
            target.addcmul_(source, torch.ones((), dtype=target.dtype, device="cpu"), value=float(number))
        else:
            target.add_(source, alpha=number)
