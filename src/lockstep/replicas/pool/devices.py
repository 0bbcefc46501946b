"""Parse the devices that a user names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

import torch

NULL_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()
"""A context manager without effect. It has no state, so one object serves all threads."""

Devices: TypeAlias = "str | int | torch.device | Sequence[str | torch.device]"
"""The names of devices, the number of devices, or "auto"."""


def parse_devices(devices: Devices) -> list[torch.device]:
    """Convert names to devices, in order.

    Repeated names are allowed, because a device can hold several replicas.

    Args:
        devices: ``"auto"`` for every GPU, or for every usable CPU core if there is no GPU; or the number of them to
            use; or a name or a list of names. A CPU device is one core, so ``["cpu", "cpu"]`` uses two.

    Raises:
        TypeError: If `devices` is none of these.
        ValueError: If there is no device, or this machine does not have one of the devices.
    """
    # `True` is an int, and would otherwise stand for one device.
    if isinstance(devices, bool) or not isinstance(devices, str | torch.device | int | Iterable):
        raise TypeError(f"`devices` must be names, a number or 'auto', got a {type(devices).__name__}.")
    if isinstance(devices, str) and devices == "auto":
        return _all_devices()
    if isinstance(devices, int):
        return _first_devices(devices)
    names = [devices] if isinstance(devices, str | torch.device) else list(devices)
    if not names:
        raise ValueError("`devices` must name at least one device, got none.")
    return [_parse(name) for name in names]


def parse_device(device: str | torch.device, argument: str) -> torch.device:
    """Convert one name to a device. ``"meta"`` is allowed.

    Args:
        device: The name of the device.
        argument: The name of the argument in error messages.

    Raises:
        ValueError: If this machine does not have the device.
    """
    return torch.device("meta") if str(device) == "meta" else _parse(device, f"`{argument}` must be one of the")


def _all_devices() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * _usable_cores()


def _first_devices(count: int) -> list[torch.device]:
    """Return the first GPUs, or that many CPU devices, which share the cores if there are fewer cores."""
    if count < 1:
        raise ValueError(f"`devices` must be at least 1, got {count}.")
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * count
    return [_parse(f"cuda:{index}") for index in range(count)]


def _usable_cores() -> int:
    """Return the number of cores that this process may use, or of all cores where the system does not tell (macOS)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _parse(name: str | torch.device, rule: str = "`devices` must name") -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{rule} devices such as 'cpu' or 'cuda:0', got {name!r}.") from error
    if device.type == "cpu":
        # Without an index, so that "cpu" and "cpu:0" compare equal.
        return torch.device("cpu")
    available = _indices(device.type)
    index: int = device.index or 0
    if index not in available:
        has = f"{device.type} devices 0..{available[-1]}" if available else f"no {device.type} device"
        raise ValueError(f"{rule} devices of this machine, which has {has}; got {name!r}.")
    return torch.device(device.type, index)


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a device the current one of its type, which only matters for GPUs.

    Args:
        device: The device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else NULL_CONTEXT


def _indices(device_type: str) -> range:
    """Return the indices of the devices of one type on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        return range(0)
    return range(torch.accelerator.device_count())
