"""Open each shard's random stream on whichever device of a process computes it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, TypeVar

import torch

from lockstep.errors import RandomStreamWarning
from lockstep.plan import Shard
from lockstep.streams import (
    THREAD_STREAMS,
    DefaultGeneratorGuard,
    DefaultStream,
    StreamOverride,
    StreamOverrideError,
    shard_stream,
    stream_seed,
)

NOTHING: Final = nullcontext()

R_co = TypeVar("R_co", covariant=True)


class Computation(Protocol[R_co]):
    """What computes shards; it may be called twice, and then its first answer is dropped."""

    def __call__(self, *, at_once: bool) -> R_co:
        """Compute all shards in their streams, on all devices at once or one shard after another."""


class ShardStreams:
    """Give the shards of one process their streams, in threads at once where that can be done.

    Args:
        devices: Those that compute, one for each place.
        turn: Held while the default generators are borrowed or looked at, so that several threads of the
            user's may compute. It must not be where shards are computed in other threads than the one that
            calls `compute`, and compute shards of their own there.
    """

    def __init__(self, devices: Sequence[torch.device], *, turn: AbstractContextManager[object] = NOTHING) -> None:
        self._devices = devices
        self._turn = turn
        self._override = StreamOverride()
        self._overrides = False
        accelerators = [device for device in devices if device.type != "cpu"]
        # Two threads on one accelerator would share its generator.
        self._one_at_a_time = len(set(accelerators)) < len(accelerators)
        self._seed = 0
        self._first = 0
        self._borrowed: DefaultStream | None = None
        self._idle: DefaultStream | None = None
        weakref.finalize(self, self._override.remove)

    def compute(self, run: Computation[R_co], *, seed: int, first: int = 0, in_threads: bool) -> R_co:
        """Compute shards, each in its own stream, and leave the default generators as they were.

        Args:
            run: Computes them; it opens their streams by `open`.
            seed: Of the streams.
            first: The position of the stream of shard 0.
            in_threads: Whether threads are to compute at once if they can; see `ReplicaSet.wants_threads`.

        Returns:
            What `run` returned.
        """
        around = self._seed, self._first, self._borrowed  # a hook may compute shards inside of shards
        self._seed, self._first, self._borrowed = seed, first, None
        try:
            if in_threads and not self._one_at_a_time and (self._overrides or self._can_override()):
                with self._turn:
                    guard = DefaultGeneratorGuard()
                try:
                    computed = run(at_once=True)
                except BaseException:
                    with self._turn:
                        guard.restore()
                    raise
                with self._turn:
                    if not guard.moved():
                        return computed
                    guard.restore()
                self._fall_back("The model drew from the default random generator past its shard's stream")
            if (
                THREAD_STREAMS.generator is not None
            ):  # inside another group's shard, whose thread has no default generator
                return run(at_once=False)
            borrowed, self._idle = self._idle or DefaultStream(*self._devices), None
            with self._turn, borrowed:
                self._borrowed = borrowed
                computed = run(at_once=False)
            self._idle = borrowed
            return computed
        finally:
            self._seed, self._first, self._borrowed = around

    def open(self, shard: Shard, device: torch.device) -> AbstractContextManager[object]:
        """Return what opens the stream of a shard in the calling thread, which computes it on a device."""
        seed = stream_seed(self._seed, self._first + shard.index)
        if self._borrowed is not None:
            self._borrowed.seed(seed)
            return NOTHING
        return shard_stream(seed) if device.type == "cpu" else _device_stream(device, seed)

    def release(self) -> None:
        """Give torch back its random kernels, until the next shards are computed at once."""
        self._overrides = False
        self._override.remove()

    def _can_override(self) -> bool:
        """Install what gives threads random streams, or go on without, once and for all."""
        try:
            self._override.install()
        except StreamOverrideError as error:
            self._fall_back(str(error))
            return False
        self._overrides = True
        return True

    def _fall_back(self, reason: str) -> None:
        """Compute one shard at a time from now on: the same bits, on one core."""
        self._one_at_a_time = True
        warnings.warn(
            f"{reason}. The shards of this process now run one at a time, with the same result.",
            RandomStreamWarning,
            stacklevel=2,
        )


@contextmanager
def _device_stream(device: torch.device, seed: int) -> Iterator[None]:
    """Open a shard's stream in a thread that has an accelerator to itself."""
    with shard_stream(seed), DefaultStream(device, cpu=False) as generators:
        generators.seed(seed)
        yield


def stream_position(device: torch.device) -> list[torch.Tensor]:
    """Tell how far the calling thread has drawn from the stream of the shard it computes on a device."""
    generator = torch.default_generator if THREAD_STREAMS.generator is None else THREAD_STREAMS.generator
    position = [generator.get_state()]
    if device.type == "cuda":
        position.append(torch.cuda.get_rng_state(device))
    return position


def resume_stream(position: Sequence[torch.Tensor], device: torch.device) -> None:
    """Go on in the open stream of a shard from such a position."""
    generator = torch.default_generator if THREAD_STREAMS.generator is None else THREAD_STREAMS.generator
    generator.set_state(position[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(position[1], device)
