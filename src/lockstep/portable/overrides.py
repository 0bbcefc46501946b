"""Register the functions that replace kernels of torch whose bits differ between processors, or that would be slow.

Each function is registered one key of the dispatcher before that of the device, so autograd, autocast and function
transforms work as before, and what a function does not compute itself goes on to torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from lockstep.portable import convolutions, linalg, products

_KEY: Final = "BackendSelect"

OVERRIDES: Final[Mapping[str, Callable[..., Any]]] = {
    "mm": products.mm,
    "addmm": products.addmm,
    "bmm": products.bmm,
    "convolution": convolutions.convolution,
    "convolution_backward": convolutions.convolution_backward,
    "cholesky": partial(linalg.cholesky, "cholesky"),
    "linalg_cholesky_ex": partial(linalg.cholesky, "linalg_cholesky_ex"),
    "linalg_lstsq": linalg.lstsq,
    "triangular_solve": linalg.triangular_solve,
    "triangular_solve.X": linalg.triangular_solve,
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
