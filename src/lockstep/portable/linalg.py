"""Compute in float64 what MKL computes differently in float32, and refuse what has no portable kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.errors import PortableKernelsError


def _in_float64(own: Callable[..., Any]) -> Callable[..., Any]:
    """Factorize in float64, because MKL's float32 Cholesky of more than 128 rows depends on the processor."""

    def cholesky(keyset: torch._C.DispatchKeySet, a: Tensor, *args: Any, **kwargs: Any) -> Any:
        if a.dtype is not torch.float32 or not a.is_cpu:
            return own(keyset, a, *args, **kwargs)
        found = own(keyset, a.double(), *args, **kwargs)
        if isinstance(found, Tensor):
            return found.float()
        factor, info = found
        return factor.float(), info

    return cholesky


def _no_sparse_solve(own: Callable[..., Any]) -> Callable[..., Any]:
    def triangular_solve(keyset: torch._C.DispatchKeySet, b: Tensor, a: Tensor, *args: Any, **kwargs: Any) -> Any:
        if a.layout is not torch.strided:
            raise PortableKernelsError(
                "`torch.triangular_solve` has no portable kernel for sparse matrices. Pass a dense one: a.to_dense()."
            )
        return own(keyset, b, a, *args, **kwargs)

    return triangular_solve


def _no_pivots(own: Callable[..., Any]) -> Callable[..., Any]:
    def lstsq(
        keyset: torch._C.DispatchKeySet,
        a: Tensor,
        b: Tensor,
        rcond: float | None = None,
        *,
        driver: str | None = None,
    ) -> Any:
        if a.is_cpu and driver in {None, "gelsy"}:
            raise PortableKernelsError(
                "`torch.linalg.lstsq` with the driver 'gelsy', the default on CPUs, gives other bits in every call. "
                "Pass driver='gels' for matrices of full rank, or driver='gelsd'."
            )
        return own(keyset, a, b, rcond, driver=driver)

    return lstsq


OVERRIDES: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "cholesky": _in_float64,
    "linalg_cholesky_ex": _in_float64,
    "linalg_lstsq": _no_pivots,
    "triangular_solve": _no_sparse_solve,
    "triangular_solve.X": _no_sparse_solve,
}
"""By the name of an operator, a function from its own kernel to its replacement."""
