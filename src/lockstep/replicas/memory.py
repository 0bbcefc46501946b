"""Read how much memory devices have used, where something counts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch

STATUS = Path("/proc/self/status")
"""The file in which Linux has the memory of a process, in KiB."""


COUNTING: Final = ("max_memory_allocated", "reset_peak_memory_stats", "empty_cache")
"""The functions of a module for a type of accelerator, such as `torch.cuda`, that counts the memory of tensors."""


def peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes that a device had in use.

    Args:
        device: An accelerator, for the memory that tensors took since `restart_peak_memory`; or a CPU, for the resident
            memory of this process since it began, which no call starts anew.

    Returns:
        The number of bytes; None where nothing counts them, as on Windows or with Apple's MPS.
    """
    if device.type == "cpu":
        return _process_peak()
    module = _counting(device)
    return None if module is None else module.max_memory_allocated(device)


def restart_peak_memory(device: torch.device) -> None:
    """Count the largest memory of an accelerator from now on; do nothing for a CPU.

    Args:
        device: The device.
    """
    if (module := _counting(device)) is not None:
        module.reset_peak_memory_stats(device)


def free_reserved_memory(device: torch.device) -> None:
    """Return memory that is reserved on an accelerator and not in use; do nothing for a CPU.

    Args:
        device: The device.
    """
    if (module := _counting(device)) is not None:
        module.empty_cache()


def is_memory_limited() -> bool:
    """Return whether a limit of this process may make allocations fail (``ulimit -v``)."""
    if sys.platform == "win32":
        return False
    import resource  # noqa: PLC0415 - Windows has none

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _counting(device: torch.device) -> Any:
    """Return the module of an accelerator if it counts memory."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if all(hasattr(module, name) for name in COUNTING) else None


def _process_peak() -> int | None:
    """Return the largest resident memory of this process in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    if STATUS.exists():
        # `getrusage` would give the peak of the process that started this one, if that was larger.
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - Windows has none

    # In bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
