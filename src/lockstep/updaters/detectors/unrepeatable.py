"""Notice when shards call a CPU kernel that gives other bits in every call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from lockstep.errors import DeterminismWarning

_KEY: Final = "BackendSelect"
_UNREPEATABLE: Final = frozenset({None, "gelsy"})
"""Drivers of `torch.linalg.lstsq` on CPUs that start with pivots from memory that torch has not set."""

_WARNING: Final = (
    "`torch.linalg.lstsq` with the driver 'gelsy', which is the default on CPUs, gives other bits in every call. The "
    "determinism guarantee does not cover it. Pass driver='gels' for matrices of full rank, or driver='gelsd'."
)


class UnrepeatableDetector:
    """Detects kernels that are not repeatable, and warns once.

    The dispatcher of torch tells of the calls. Of CPU kernels there is one that `torch.use_deterministic_algorithms`
    does not know: `torch.linalg.lstsq` with its default driver.
    """

    def __init__(self) -> None:
        self.has_warned = False
        """Whether the warning has been given."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Warn if the kernel is called before the end."""
        name = "aten::linalg_lstsq"
        # Another updater that watches in another thread, or another library, has registered it.
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY):  # noqa: SLF001 - no public way
            yield
            return
        called: list[None] = []
        below = torch._C._dispatch_keyset_full_after(torch.DispatchKey.BackendSelect)  # noqa: SLF001 - no public way
        cpu, redispatch = torch.DispatchKey.CPU, torch.ops.aten.linalg_lstsq.default.redispatch

        def call(keyset: torch._C.DispatchKeySet, *args: Any, driver: str | None = None) -> Any:
            if driver in _UNREPEATABLE and keyset.has(cpu):
                called.append(None)
            return redispatch(keyset & below, *args, driver=driver)

        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's gap
        try:
            library.impl("linalg_lstsq", call, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
            yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001
        if called:
            self.has_warned = True
            warnings.warn(_WARNING, DeterminismWarning, stacklevel=2)
