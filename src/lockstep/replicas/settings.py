"""The settings under which a thread computes: taken from the caller, carried into every worker.

In PyTorch, grad mode, autocast, the default device and the number of intra-op threads belong to a
thread, and a new thread knows nothing of its maker's. The default dtype and the deterministic switches
belong to the process and need no carrying.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch

SMALLEST_DENORMAL = 5e-324


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast on one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """What a thread must agree on with all others before it computes a shard.

    Attributes:
        grad: Whether operations are recorded for backward.
        inference: Whether the caller is in inference mode.
        autocast: The state of autocast, one entry a device type. Its cache of cast weights is one for
            the whole process and is emptied by whichever thread leaves autocast first, so shards never
            use it.
        default_device: Where factory functions without a `device` make tensors; None for the usual place.
        flush_denormal: Whether the processor rounds denormal numbers to zero.
    """

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    default_device: torch.device | None
    flush_denormal: bool

    @classmethod
    def capture(cls, device_types: frozenset[str]) -> ThreadSettings:
        """Take the settings of the calling thread, autocast for these types of device."""
        default_device = torch.get_default_device()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted(device_types)
            ),
            default_device=None if default_device.type == "cpu" else default_device,
            flush_denormal=_flushes_denormals(),
        )


class Applied:
    """Compute under given settings and one intra-op thread; leave the thread as it was found.

    One intra-op thread: kernels cut their work by the number of threads and round differently for
    another cut, and shards side by side are faster than threads within a shard.
    """

    __slots__ = ("_autocast", "_cache", "_device", "_flush", "_grad", "_inference", "_settings", "_threads")

    def __init__(self, settings: ThreadSettings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        settings = self._settings
        self._threads = torch.get_num_threads()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            Autocast(cast.device_type, *_autocast_state(cast.device_type)) for cast in settings.autocast
        ]
        self._flush = _flushes_denormals()
        self._inference = _inference(settings)
        self._device: AbstractContextManager[object] = settings.default_device or nullcontext()
        torch.set_num_threads(1)
        self._inference.__enter__()
        torch.set_grad_enabled(settings.grad)
        torch.set_autocast_cache_enabled(False)
        _set_autocast(settings.autocast)
        if settings.flush_denormal != self._flush:
            torch.set_flush_denormal(settings.flush_denormal)
        self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.__exit__(kind, error, trace)
        if self._settings.flush_denormal != self._flush:
            torch.set_flush_denormal(self._flush)
        _set_autocast(self._autocast)
        torch.set_autocast_cache_enabled(self._cache)
        self._inference.__exit__(kind, error, trace)
        torch.set_grad_enabled(self._grad)
        torch.set_num_threads(self._threads)


def _inference(settings: ThreadSettings) -> AbstractContextManager[object]:
    """Enter or leave inference mode where the thread is not as the settings ask."""
    if settings.inference == torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(settings.inference)


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _set_autocast(states: tuple[Autocast, ...] | list[Autocast]) -> None:
    for cast in states:
        torch.set_autocast_enabled(cast.device_type, cast.enabled)
        torch.set_autocast_dtype(cast.device_type, cast.dtype)


def _flushes_denormals() -> bool:
    """Ask this thread's floating-point unit; PyTorch sets the switch but cannot read it."""
    return SMALLEST_DENORMAL * 1.0 == 0.0
