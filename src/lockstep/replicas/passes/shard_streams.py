"""Open the random stream of each shard on the device that computes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias, TypeVar

import torch

from lockstep.errors import RandomStreamWarning, warn
from lockstep.plan import Shard
from lockstep.replicas.pool.devices import NO_MODULE, NULL_CONTEXT
from lockstep.streams import (
    THREAD_STREAMS,
    DefaultGeneratorGuard,
    DefaultStream,
    StreamOverride,
    StreamOverrideError,
    shard_stream,
    stream_seed,
)

R = TypeVar("R")

Computation: TypeAlias = Callable[..., R]
"""A function that computes all shards in their streams. It is called with `parallel`, whether to use all devices at the
same time instead of computing one shard after another, and may be called twice; the first result is then discarded."""


class ShardStreams:
    """The random streams of the shards of one process, which are computed in parallel threads if that is possible.

    Args:
        devices: The devices that compute the shards, by index.
        lock: A context manager to hold while the default generators are seeded or compared, so that several threads of
            the user can compute. It must not be a lock if shards are computed in other threads than the one that calls
            `run`, and a shard computes shards of its own there.
    """

    def __init__(self, devices: Sequence[torch.device], *, lock: AbstractContextManager[object] = NULL_CONTEXT) -> None:
        self._devices = devices
        self._lock = lock
        self._override = StreamOverride()
        self._override_installed = False
        accelerators = [device for device in devices if device.type != "cpu"]
        # Two threads on one accelerator would draw from the same generator, in an order that varies.
        self.one_at_a_time = len(set(accelerators)) < len(accelerators)
        """Whether the shards of this process are computed one after another."""
        self.has_drawn: bool | None = None
        """Whether a shard has drawn since this was set to False; None where nothing is noted."""
        self._seed = 0
        self._first = 0
        self._default_stream: DefaultStream | None = None
        self._spare_stream: DefaultStream | None = None
        weakref.finalize(self, self._override.remove)

    def run(self, computation: Computation[R], *, seed: int, first: int = 0, parallel: bool) -> R:
        """Compute shards, each in its own stream, and leave the default generators as they were.

        Args:
            computation: The function that computes the shards, and opens the stream of each by `open`.
            seed: The seed of the streams.
            first: The position of the stream of shard 0.
            parallel: Whether to compute in parallel threads if possible (see `ReplicaSet.wants_threads`).

        Returns:
            The result of `computation`.
        """
        # A hook may compute other shards inside of a shard, after which the outer ones continue.
        outer = self._seed, self._first, self._default_stream
        self._seed, self._first, self._default_stream = seed, first, None
        try:
            if parallel and not self.one_at_a_time and (self._override_installed or self._can_override()):
                # The lock is not held during the computation, only while the default generator is read or written.
                with self._lock:
                    guard = DefaultGeneratorGuard()
                try:
                    computed = computation(parallel=True)
                except BaseException:
                    with self._lock:
                        # A user who catches the error must find the default generator as it was.
                        guard.restore()
                    raise
                with self._lock:
                    if not guard.moved():
                        return computed
                    guard.restore()
                self._fall_back("The model drew from the default random generator past its shard's stream")
            # Inside a shard of another group, whose own stream is drawn from instead of the default generator.
            if THREAD_STREAMS.generator is not None:
                return computation(parallel=False)
            default_stream, self._spare_stream = self._spare_stream or DefaultStream(*self._devices), None
            with self._lock, default_stream:
                self._default_stream = default_stream
                computed = computation(parallel=False)
            self._spare_stream = default_stream
            return computed
        finally:
            self._seed, self._first, self._default_stream = outer

    def open(self, shard: Shard, device: torch.device) -> AbstractContextManager[object]:
        """Return a context manager that opens the stream of a shard in the calling thread.

        Args:
            shard: The shard.
            device: The device that computes it.
        """
        seed = stream_seed(self._seed, self._first + shard.index)
        if self._default_stream is not None:
            self._default_stream.seed(seed)
            stream = NULL_CONTEXT
        else:
            stream = shard_stream(seed) if device.type == "cpu" else _device_stream(device, seed)
        return stream if self.has_drawn is None else self._noting_draws(stream, device)

    @contextmanager
    def _noting_draws(self, stream: AbstractContextManager[object], device: torch.device) -> Iterator[None]:
        """Open a stream, and note whether the shard draws from it."""
        with stream:
            before = stream_position(device)
            yield
            self.has_drawn = self.has_drawn or not all(map(torch.equal, before, stream_position(device)))

    def release(self) -> None:
        """Restore the random kernels of torch until shards are computed in parallel again."""
        self._override_installed = False
        self._override.remove()

    def _can_override(self) -> bool:
        """Install the override that gives each thread its stream, or stop using threads for good if that fails."""
        try:
            self._override.install()
        except StreamOverrideError as error:
            self._fall_back(str(error))
            return False
        self._override_installed = True
        return True

    def _fall_back(self, reason: str) -> None:
        """Compute one shard at a time from now on, which gives the same bits on a single core."""
        self.one_at_a_time = True
        warn(f"{reason}. The shards of this process now run one at a time, with the same result.", RandomStreamWarning)


@contextmanager
def _device_stream(device: torch.device, seed: int) -> Iterator[None]:
    """Open the stream of a shard in a thread that is the only one to use an accelerator."""
    with shard_stream(seed), DefaultStream(device, cpu=False) as generators:
        generators.seed(seed)
        yield


def stream_position(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the stream of the shard that the calling thread computes on a device.

    Args:
        device: The device.
    """
    position = [THREAD_STREAMS.current.get_state()]
    if device.type not in NO_MODULE:
        position.append(torch.get_device_module(device).get_rng_state(device))
    return position


def resume_stream(position: Sequence[torch.Tensor], device: torch.device) -> None:
    """Continue the open stream of a shard from a state that `stream_position` returned.

    Args:
        position: The state.
        device: The device of the shard.
    """
    THREAD_STREAMS.current.set_state(position[0])
    if device.type not in NO_MODULE:
        torch.get_device_module(device).set_rng_state(position[1], device)
