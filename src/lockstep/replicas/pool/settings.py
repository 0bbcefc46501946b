"""The settings under which a thread computes: taken from the caller, carried into every worker.

In PyTorch, grad mode, autocast, the default device and the number of intra-op threads belong to a
thread, and a new thread knows nothing of its maker's. The default dtype and the deterministic switches
belong to the process and need no carrying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final

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
        streams: The CUDA stream that is current on each GPU, so that what a worker reads has been written,
            and what it writes is read afterwards.
    """

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    default_device: torch.device | None
    flush_denormal: bool
    streams: tuple[torch.cuda.Stream, ...] = ()

    @classmethod
    def capture(cls, device_types: Sequence[str], *, training: bool = False) -> ThreadSettings:
        """Take the settings of the calling thread.

        Args:
            device_types: Those to take the state of autocast for.
            training: Record for backward, whatever the thread does now.
        """
        has_modes = torch._C._len_torch_function_stack()  # noqa: SLF001 - a tenth of the time of the public way
        return cls(
            grad=training or torch.is_grad_enabled(),
            inference=not training and torch.is_inference_mode_enabled(),
            autocast=tuple(map(_autocast, device_types)),
            default_device=_default_device() if has_modes else None,
            flush_denormal=SMALLEST_DENORMAL * 1.0 == 0.0,  # the processor is asked, torch only sets the switch
            streams=_current_streams() if "cuda" in device_types else (),
        )


SINGLE_THREAD: Final = ThreadSettings(
    grad=True, inference=False, autocast=(), default_device=None, flush_denormal=False
)
"""To train in the calling thread only: nothing is handed to another one, so nothing else need be known."""


class OneIntraOpThread:
    """Compute with one intra-op thread in the calling thread; afterwards with as many as before.

    Kernels cut their work by the number of threads and round differently for another cut, and shards
    side by side are faster than threads within a shard. Where the number is 1 already nothing is done:
    every change of it empties oneDNN's caches, which costs the next convolutions a fraction of a millisecond.
    """

    __slots__ = ("_threads",)

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads != 1:
            torch.set_num_threads(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads != 1:
            torch.set_num_threads(self._threads)


class ComputeMode:
    """Put the calling thread into the state in which shards are computed; leave it as it was found.

    Args:
        settings: Of this very thread; what other threads shall agree on.
    """

    __slots__ = ("_cache", "_grad", "_inference", "_settings", "_threads")

    def __init__(self, settings: ThreadSettings) -> None:
        self._settings = settings

    def __enter__(self) -> ThreadSettings:
        settings = self._settings
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._inference: AbstractContextManager[object] | None = None
        self._threads = torch.get_num_threads()
        if self._threads != 1:  # see `OneIntraOpThread`
            torch.set_num_threads(1)
        if settings.inference != torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(settings.inference)
            self._inference.__enter__()
        torch._C._set_grad_enabled(settings.grad)
        torch.set_autocast_cache_enabled(False)
        return settings

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_autocast_cache_enabled(self._cache)
        if self._inference is not None:
            self._inference.__exit__(kind, error, trace)
        torch._C._set_grad_enabled(self._grad)
        if self._threads != 1:
            torch.set_num_threads(self._threads)


class InheritedSettings(ComputeMode):
    """Compute under the settings of another thread; leave this one as it was found.

    Args:
        settings: Of the thread that asks for the work.
    """

    __slots__ = ("_autocast", "_device", "_flush", "_streams")

    def __enter__(self) -> ThreadSettings:
        settings = self._settings
        self._autocast = _switch_autocast(settings.autocast)
        self._flush = SMALLEST_DENORMAL * 1.0 == 0.0
        self._device: AbstractContextManager[object] | None = settings.default_device
        self._streams = _switch_streams(settings.streams) if settings.streams else ()
        super().__enter__()
        if settings.flush_denormal != self._flush:
            torch.set_flush_denormal(settings.flush_denormal)
        if self._device is not None:
            self._device.__enter__()
        return settings

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, trace)
        if self._settings.flush_denormal != self._flush:
            torch.set_flush_denormal(self._flush)
        if self._autocast:
            _switch_autocast(self._autocast)
        super().__exit__(kind, error, trace)
        if self._streams:
            _switch_streams(self._streams)


def _autocast(device_type: str) -> Autocast:
    return Autocast(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))


def _switch_autocast(states: Iterable[Autocast]) -> list[Autocast]:
    """Set autocast where it is in another state, and give the states that were there."""
    before = []
    for cast in states:
        kind = cast.device_type
        if torch.is_autocast_enabled(kind) != cast.enabled or torch.get_autocast_dtype(kind) != cast.dtype:
            before.append(_autocast(kind))
            torch.set_autocast_enabled(kind, cast.enabled)
            torch.set_autocast_dtype(kind, cast.dtype)
    return before


def _default_device() -> torch.device | None:
    """Return the calling thread's default device, None for the CPU."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _current_streams() -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.current_stream(index) for index in range(torch.cuda.device_count()))


def _switch_streams(streams: Iterable[torch.cuda.Stream]) -> tuple[torch.cuda.Stream, ...]:
    """Make each stream the current one of its GPU, and return those that were.

    Which GPU is current afterwards is not promised.
    """
    before = _current_streams()
    for stream in streams:
        torch.cuda.set_stream(stream)
    return before
