"""Read what the user names as devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

import torch

_NOTHING: Final = nullcontext()

Devices: TypeAlias = "str | int | torch.device | Sequence[str | torch.device]"


def parse_devices(devices: Devices) -> list[torch.device]:
    """Turn names into devices, in order; repeats are allowed, for a device may hold several replicas.

    Args:
        devices: ``"auto"`` for every GPU, else every core this process may use; or so many of these; or a
            name, or a list of names. On a CPU a device is one core: ``["cpu", "cpu"]`` are two.

    Raises:
        TypeError: They are nothing of this kind.
        ValueError: There is none, or this machine has no such device.
    """
    if isinstance(devices, bool) or not isinstance(devices, str | torch.device | int | Iterable):
        raise TypeError(f"`devices` must be names, a number or 'auto', got a {type(devices).__name__}.")
    if isinstance(devices, str) and devices == "auto":
        return _every_device()
    if isinstance(devices, int):
        return _so_many(devices)
    names = [devices] if isinstance(devices, str | torch.device) else list(devices)
    if not names:
        raise ValueError("`devices` must name at least one device, got none.")
    return [_parse(name) for name in names]


def parse_device(device: str | torch.device, argument: str) -> torch.device:
    """Turn one name into a device, ``"meta"`` among them.

    Args:
        device: The name.
        argument: What errors call it.

    Raises:
        ValueError: This machine has no such device.
    """
    return torch.device("meta") if str(device) == "meta" else _parse(device, f"`{argument}` must be one of the")


def _every_device() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * _usable_cores()


def _so_many(count: int) -> list[torch.device]:
    """Take the first GPUs, or cores; cores may be more than there are, and then take turns."""
    if count < 1:
        raise ValueError(f"`devices` must be at least 1, got {count}.")
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * count
    return [_parse(f"cuda:{index}") for index in range(count)]


def _usable_cores() -> int:
    """Count the cores this process may use; where the system does not say (macOS), those there are."""
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
        return torch.device("cpu")
    available = _indices(device.type)
    index: int = device.index or 0
    if index not in available:
        has = f"{device.type} devices 0..{available[-1]}" if available else f"no {device.type} device"
        raise ValueError(f"{rule} devices of this machine, which has {has}; got {name!r}.")
    return torch.device(device.type, index)


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of its type; a CPU needs none."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def _indices(device_type: str) -> range:
    """List this machine's devices of one type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        return range(0)
    return range(torch.accelerator.device_count())
