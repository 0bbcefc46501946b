"""Recognize errors that mean that memory does not suffice."""

from __future__ import annotations

from typing import Final

import torch

MESSAGES: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of a `RuntimeError` by which torch says so: of the CPU's allocator (that of Windows second), of
accelerators whose error has no class of its own, and of libraries that allocate memory themselves."""


def is_memory_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that memory does not suffice.

    Args:
        error: The error; None for none.

    >>> is_memory_error(torch.OutOfMemoryError()), is_memory_error(MemoryError()), is_memory_error(ValueError())
    (True, True, False)
    """
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES):
            return True
        error = error.__cause__
    return False
