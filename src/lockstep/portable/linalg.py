"""Compute in float64 what MKL computes differently in float32, and refuse what has no portable kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import PortableKernelsError


def cholesky(operator: str, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Factorize in float64, because MKL's float32 Cholesky of more than 128 rows depends on the processor.

    Args:
        operator: The name of torch's operator.
        a: The matrices.
        args: The other arguments of the operator.
        kwargs: Its arguments by name.
    """
    if a.dtype is not torch.float32 or not a.is_cpu:
        return None
    found = getattr(torch.ops.aten, operator)(a.double(), *args, **kwargs)
    if isinstance(found, Tensor):
        return found.float()
    factor, info = found
    return factor.float(), info


def triangular_solve(_b: Tensor, a: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Refuse sparse matrices."""
    if a.layout is not torch.strided:
        raise PortableKernelsError(
            "`torch.triangular_solve` has no portable kernel for sparse matrices. Pass a dense one: a.to_dense()."
        )


def lstsq(a: Tensor, *_args: Any, driver: str | None = None) -> None:
    """Refuse the driver that gives other bits in every call."""
    if a.is_cpu and driver in {None, "gelsy"}:
        raise PortableKernelsError(
            "`torch.linalg.lstsq` with the driver 'gelsy', the default on CPUs, gives other bits in every call. "
            "Pass driver='gels' for matrices of full rank, or driver='gelsd'."
        )
