"""The settings under which a thread computes, captured from the calling thread and applied in every worker.

In PyTorch, grad mode, autocast, the default device and the number of intra-op threads belong to a thread, and a new
thread does not inherit them. The default dtype and the deterministic switches belong to the process. Modes, hooks of
saved tensors and transforms of `torch.func` belong to a thread too, but are objects that may count or store what they
see. They are not applied in other threads; all work stays in the calling thread instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from lockstep.errors import OrderError, warn
from lockstep.replicas.pool.probes import FreshMemory, TakingTurns

LEVELS: Final = threading.RLock()
"""Held by the thread that is inside of a level."""


def serialize_forward_mode() -> None:
    """Serialize levels of forward-mode differentiation: threads wait for each other, in the whole process from now on.

    Calling this again has no effect. Levels may still be nested within a thread, as far as torch supports it.
    """
    with LEVELS:
        # `jvp` counts how deep it is nested in a variable of its own, before it enters a level.
        for module, name in ((forward_ad, "dual_level"), (eager_transforms, "jvp_nesting")):
            enter, leave = getattr(module, f"enter_{name}"), getattr(module, f"exit_{name}")
            if not isinstance(enter, partial):
                setattr(module, f"enter_{name}", partial(_enter, enter))
                setattr(module, f"exit_{name}", partial(_exit, leave))


def _enter(enter: Callable[[], int]) -> int:
    LEVELS.acquire()
    try:
        return enter()
    except BaseException:
        LEVELS.release()
        raise


def _exit(leave: Callable[..., None], **level: Any) -> None:
    try:
        leave(**level)
    finally:
        # It is not owned if the level was entered before the first call of `serialize_forward_mode`.
        if LEVELS._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            LEVELS.release()


CHECKPOINT: Final = "torch.utils.checkpoint"

SMALLEST_DENORMAL = 5e-324
"""The smallest positive float64. It becomes zero in arithmetic if the processor flushes denormal numbers."""


AutocastState: TypeAlias = "tuple[str, bool, torch.dtype]"
"""The type of a device, such as ``"cpu"``, whether autocast is enabled for it, and the dtype that operations are cast
to."""


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """The settings that all threads must agree on before they compute a shard.

    Attributes:
        grad: Whether operations are recorded for backward.
        inference: Whether the caller is in inference mode.
        autocast: The state of autocast, one entry per type of device. Its cache of cast weights is shared by the whole
            process and is cleared by the first thread that leaves autocast, so shards never use it.
        default_device: The device on which factory functions without a `device` create tensors, or None for the CPU.
        flush_denormal: Whether the processor rounds denormal numbers to zero.
        streams: The current stream of each accelerator in use, so that what a worker reads has been written and what it
            writes is read afterwards.
        kept: The name of what the caller is inside of and other threads cannot be given, or an empty string. All work
            then stays in the calling thread.
    """

    grad: bool
    inference: bool
    autocast: tuple[AutocastState, ...]
    default_device: torch.device | None
    flush_denormal: bool
    streams: tuple[torch.Stream, ...] = ()
    kept: str = ""

    @classmethod
    def capture(
        cls, device_types: Sequence[str], accelerators: Sequence[torch.device] = (), *, training: bool = False
    ) -> ThreadSettings:
        """Return the settings of the calling thread.

        Args:
            device_types: The types of devices whose autocast state is captured.
            accelerators: The accelerators whose current streams are captured.
            training: Whether to record operations for backward even if the thread currently does not.
        """
        num_modes = torch._C._len_torch_function_stack()  # noqa: SLF001 - a tenth of the time of the public way
        return cls(
            grad=training or torch.is_grad_enabled(),
            inference=not training and torch.is_inference_mode_enabled(),
            autocast=tuple(map(_autocast_state, device_types)),
            # A default device is a torch function mode, so without modes there is none and the slow lookup is skipped.
            default_device=_default_device() if num_modes else None,
            # torch can set this switch but not read it, so a product shows how the processor rounds.
            flush_denormal=SMALLEST_DENORMAL * 1.0 == 0.0,
            streams=tuple(map(torch.accelerator.current_stream, accelerators)) if accelerators else (),
            kept=_kept_by_thread(num_modes),
        )


SINGLE_THREAD: Final = ThreadSettings(
    grad=True, inference=False, autocast=(), default_device=None, flush_denormal=False
)
"""The settings for training in the calling thread only. No other thread needs settings, so no others are captured."""


class OneIntraOpThread:
    """A context manager that sets the number of intra-op threads to 1 and restores it afterwards.

    Kernels divide their work by the number of threads and round differently for another division. Besides, shards in
    parallel are faster than several threads within a shard. If the number is 1 already, nothing is done: every change
    of it clears the caches of oneDNN, which costs the next convolutions a fraction of a millisecond.
    """

    __slots__ = ("_threads",)

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads != 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._threads != 1:
            torch.set_num_threads(self._threads)


class ComputeMode:
    """A context manager that switches the calling thread to the state in which shards are computed.

    Args:
        settings: The settings of the calling thread, which other threads will use too.
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
        if self._threads != 1:
            torch.set_num_threads(1)
        if settings.inference != torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(settings.inference)
            self._inference.__enter__()
        # Set after entering inference mode, which changes the grad mode too.
        torch._C._set_grad_enabled(settings.grad)
        # The cache belongs to the process: a shard must not use a weight that another thread has cast or cleared.
        torch.set_autocast_cache_enabled(False)
        return settings

    def __exit__(self, *raised: Any) -> None:
        torch.set_autocast_cache_enabled(self._cache)
        if self._inference is not None:
            self._inference.__exit__(*raised)
        # Restored after leaving inference mode, for the same reason as above.
        torch._C._set_grad_enabled(self._grad)
        if self._threads != 1:
            torch.set_num_threads(self._threads)


@contextmanager
def inherited(settings: ThreadSettings) -> Iterator[None]:
    """Return a context manager that computes under the settings of another thread and restores its own afterwards.

    Args:
        settings: The settings of the thread that requested the work.
    """
    autocast = _switch_autocast(settings.autocast)
    streams = _switch_streams(settings.streams) if settings.streams else []
    flush = SMALLEST_DENORMAL * 1.0 == 0.0
    try:
        with ComputeMode(settings), settings.default_device or nullcontext():
            if settings.flush_denormal != flush:
                torch.set_flush_denormal(settings.flush_denormal)
            yield
    finally:
        if settings.flush_denormal != flush:
            torch.set_flush_denormal(flush)
        if autocast:
            _switch_autocast(autocast)
        if streams:
            _switch_streams(streams)


def _autocast_state(device_type: str) -> AutocastState:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _switch_autocast(states: Iterable[AutocastState]) -> list[AutocastState]:
    """Apply autocast states where they differ, and return the previous states of those."""
    before = []
    for kind, enabled, dtype in states:
        # Unchanged states are skipped, because setting them takes longer than reading them.
        if torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype:
            before.append(_autocast_state(kind))
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
    return before


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, as a hook of saved tensors that changes nothing."""
    return tensor


def module_of_hooks() -> str | None:
    """Return the name of the module that defines the saved tensor hooks of the calling thread, or None without any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001 - no public way
    return None if hooks is None else getattr(hooks[0], "__module__", "")


def _kept_by_thread(num_modes: int) -> str:
    """Return the name of what the calling thread is inside of and other threads cannot be given, or an empty string.

    Args:
        num_modes: The number of torch function modes.
    """
    # The default device is captured by itself, and an audit is content with the memory of one thread.
    modes = map(torch._C._get_function_stack_at, range(num_modes))  # noqa: SLF001 - no public way
    if num_modes and not all(isinstance(mode, DeviceContext | FreshMemory | TakingTurns) for mode in modes):
        return "a `TorchFunctionMode`"
    if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - as above
        return "a `TorchDispatchMode`"
    # `DataParallel` replaces the hooks of activation checkpointing by those of this module.
    if module_of_hooks() not in (None, CHECKPOINT, __name__):
        return "`torch.autograd.graph.saved_tensors_hooks`"
    if torch._C._functorch.maybe_current_level() is not None:  # noqa: SLF001 - as above
        return "a transform of `torch.func`"
    # The threads of replicas would wait for this one.
    if LEVELS._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
        return "a level of forward-mode differentiation"
    return ""


def warn_of_kept(kept: str) -> None:
    """Warn that all work stays in the calling thread.

    Args:
        kept: The name of what the thread is inside of.
    """
    warn(
        f"The calling thread is inside of {kept}, which no other thread can be given, so the devices of this process "
        "work in this thread, one after another and without a timeout, with the same result. Enter it in the loss "
        "function or in forward to use all devices at the same time."
    )


def _default_device() -> torch.device | None:
    """Return the default device of the calling thread, or None for the CPU."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _switch_streams(streams: Iterable[torch.Stream]) -> list[torch.Stream]:
    """Set the current streams of accelerators where they differ, and return the previous ones of those."""
    before = []
    for stream in streams:
        current = torch.accelerator.current_stream(stream.device)
        # Compared first, because setting a stream may also make its device the current one.
        if current != stream:
            before.append(current)
            torch.get_device_module(stream.device).set_stream(stream)
    return before


class _RefusingCache(dict[Any, Any]):
    """A cache of `parametrize.cached` that raises where it is read."""

    def get(self, *_: Any) -> Any:
        """Raise an error.

        Raises:
            OrderError: Always.
        """
        raise OrderError(
            "`torch.nn.utils.parametrize.cached` cannot be used on several devices of one process: it keeps the "
            "weights of a module for all threads, so that one replica would compute with the weights of another. Leave "
            "it out, or use one device per process, as with `lockstep run -n 2` and devices=['cpu']."
        )


REFUSING_CACHE: Final = _RefusingCache()
"""What `parametrize.cached` is given as its cache while several threads compute."""
