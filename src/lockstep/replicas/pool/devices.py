"""Parse the devices that a user names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

import torch

from lockstep.communicators import RunEnvironment, read_environment

SINGLE_PROCESS: Final = RunEnvironment(0, 1)
"""The environment of a process that was not started by a launcher."""

NULL_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()
"""A context manager without effect. It has no state, so one object serves all threads."""

NO_MODULE: Final = frozenset({"cpu", "meta"})
"""The types of devices that have no current device."""

NEEDED: Final = ("default_generators", "device", "get_rng_state", "set_rng_state", "set_stream")
"""What shards need of torch's module for a type of accelerator, such as `torch.cuda`."""

Devices: TypeAlias = "str | int | torch.device | Sequence[str | torch.device]"
"""The names of devices, the number of devices, or "auto"."""


def parse_devices(devices: Devices) -> list[torch.device]:
    """Convert names to devices, in order.

    Repeated names are allowed, because a device can hold several replicas.

    Args:
        devices: ``"auto"`` for this rank's share of the GPUs of the machine, or of the usable CPU cores if there is no
            GPU; or the number of devices per rank; or a name or a list of names. A CPU device is one core, so
            ``["cpu", "cpu"]`` uses two.

    Raises:
        TypeError: If `devices` is none of these.
        ValueError: If there is no device, or this machine does not have one of the devices.
    """
    # `True` is an int, and would otherwise stand for one device.
    if isinstance(devices, bool) or not isinstance(devices, str | torch.device | int | Iterable):
        raise TypeError(f"`devices` must be names, a number or 'auto', got a {type(devices).__name__}.")
    if isinstance(devices, int) and devices < 1:
        raise ValueError(f"`devices` must be at least 1, got {devices}.")
    if isinstance(devices, int) or (isinstance(devices, str) and devices == "auto"):
        count = devices if isinstance(devices, int) else None
        return _of_rank(count, read_environment(os.environ) or SINGLE_PROCESS)
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


def _of_rank(count: int | None, environment: RunEnvironment) -> list[torch.device]:
    """Return the first GPUs of this rank, or CPU devices if the machine has none; by default all, and at least one."""
    kind, available = _accelerators()
    if not available or not all(hasattr(torch.get_device_module(kind), name) for name in NEEDED):
        cores = count or max(1, len(_share_of(range(usable_cores()), environment)))
        return [torch.device("cpu")] * cores
    gpus = _gpus_of(environment, available)
    if count is not None and count > len(gpus):
        share = "" if environment.local_size == 1 else f" for each of its {environment.local_size} ranks"
        raise ValueError(f"`devices` must be at most {len(gpus)}, the GPUs that this machine has{share}, got {count}.")
    return [torch.device(kind, index) for index in gpus[:count]]


def _gpus_of(environment: RunEnvironment, count: int) -> range:
    """Return the indices of the GPUs that belong to this rank.

    If a launcher has restricted the GPUs that this rank can see, all of them belong to it. This is the case if it sees
    fewer GPUs than there are ranks on the machine, or if SLURM assigns GPUs to each task.
    """
    if count < environment.local_size or environment.own_gpus:
        return range(count)
    return _share_of(range(count), environment)


def _share_of(indices: range, environment: RunEnvironment) -> range:
    """Cut a range into one part per rank of the machine, as equal as possible, and return the part of this rank.

    >>> [_share_of(range(7), RunEnvironment(rank, 3, rank, 3)) for rank in range(3)]
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    rank, size = environment.local_rank, environment.local_size
    return indices[len(indices) * rank // size : len(indices) * (rank + 1) // size]


def usable_cores() -> int:
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
    kind, count = _accelerators()
    index: int = device.index or 0
    if device.type != kind or index >= count:
        has = f"{kind} devices 0..{count - 1}" if device.type == kind else f"no {device.type} device"
        raise ValueError(f"{rule} devices of this machine, which has {has}; got {name!r}. Or 'auto'.")
    return torch.device(device.type, index)


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a device the current one of its type, which only matters for accelerators.

    Args:
        device: The device.
    """
    if device.type in NO_MODULE:
        return NULL_CONTEXT
    context: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return context


def _accelerators() -> tuple[str, int]:
    """Return the type of the accelerators of this machine and how many there are, which may be none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


class CopyStreams:
    """One stream per accelerator, on which data is prepared that the current stream uses later.

    Args:
        accelerators: The accelerators.
    """

    def __init__(self, accelerators: Iterable[torch.device]) -> None:
        self._streams = {device: torch.Stream(device) for device in accelerators}

    def start(self) -> None:
        """Order what is prepared from now on after all work that the current streams have been given so far."""
        # Data on the device may still be written there, and memory that is free on the host may still be read.
        for device, stream in self._streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))

    def preparing_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which work for a device is given to its copy stream; without effect for a CPU."""
        return self._streams.get(device, NULL_CONTEXT)

    def hand_over(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        """Allow the current stream of a device to use tensors that were prepared on its copy stream.

        Args:
            device: The device.
            tensors: The tensors; those on other devices are left alone.
        """
        stream = self._streams.get(device)
        if stream is None:
            return
        current = torch.accelerator.current_stream(device)
        current.wait_stream(stream)
        for tensor in tensors:
            # Their memory belongs to the copy stream, which would write to it again while the current stream reads it.
            if tensor.device == device:
                tensor.record_stream(current)
