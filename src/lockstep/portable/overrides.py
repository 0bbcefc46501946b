"""Register the functions that replace kernels of torch whose bits differ between processors, or that would be slow.

Each function is registered one key of the dispatcher before that of the device, so autograd, autocast and function
transforms work as before, and what a function does not compute itself goes on to torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.errors import PortableKernelsError
from lockstep.portable import convolutions, products


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


_KEY: Final = "BackendSelect"

OVERRIDES: Final[Mapping[str, Callable[..., Any]]] = {
    "mm": products.mm,
    "addmm": products.addmm,
    "bmm": products.bmm,
    "convolution": convolutions.convolution,
    "convolution_backward": convolutions.convolution_backward,
    "cholesky": partial(cholesky, "cholesky"),
    "linalg_cholesky_ex": partial(cholesky, "linalg_cholesky_ex"),
    "linalg_lstsq": lstsq,
    "triangular_solve": triangular_solve,
    "triangular_solve.X": triangular_solve,
}
"""By the name of an operator, a function of its arguments that returns its result, or None for that of torch."""


def install(left_out: str = "") -> torch.library.Library:
    """Register all replacements. An operator that this torch no longer has needs none: torch 2.15 has no `cholesky`.

    Args:
        left_out: The operator that keeps its kernel, by which tests show that each replacement is needed.

    Returns:
        The library that holds the registrations, and undoes them when it is destroyed.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's gap
    for name, replace in OVERRIDES.items():
        if name != left_out and hasattr(torch.ops.aten, name.partition(".")[0]):
            library.impl(name, _first(replace, name), _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _first(replace: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a kernel that passes a call on to torch's own one where its replacement returns None."""
    operator, _, overload = name.partition(".")
    redispatch = getattr(getattr(torch.ops.aten, operator), overload or "default").redispatch
    below = torch._C._dispatch_keyset_full_after(torch.DispatchKey.BackendSelect)  # noqa: SLF001 - no public way

    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        found = replace(*args, **kwargs)
        return redispatch(keyset & below, *args, **kwargs) if found is None else found

    return call
