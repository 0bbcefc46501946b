"""Seed the default generators for each shard, where shards are computed one at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch

from lockstep.errors import OrderError
from lockstep.streams.seeds import NUM_SEEDS, check_seed
from lockstep.streams.state import DEFAULT_GENERATOR

# One per process, like the default generator. It keeps threads from seeding the generator for different shards.
# Reentrant, because a hook may compute shards inside a shard.
DEFAULT_GENERATOR_LOCK: Final = threading.RLock()


class DefaultStream:
    """Seed the default generators for the shards of one update, and restore their states at the end.

    Nothing in torch is changed, so every way to draw is covered. However, the default CPU generator exists once per
    process, so only one thread may use this at a time (see `DEFAULT_GENERATOR_LOCK`). Threads that each drive an
    accelerator of their own pass ``cpu=False``, which seeds only the generator of that device, and use a `shard_stream`
    for what they draw on the CPU.

    Args:
        *devices: The devices that compute the shards: "cpu", or accelerators, whose generators are seeded too.
        cpu: Whether to seed the default CPU generator.

    Raises:
        ValueError: If a device has no default generator.

    Determinism: On a CPU, the bits are those of a `shard_stream` with the same seed.

    >>> before = torch.get_rng_state()
    >>> with DefaultStream("cpu") as stream:
    ...     for shard in range(2):
    ...         stream.seed(shard)
    ...         drawn = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """

    __slots__ = ("_cpu", "_devices", "_saved")

    def __init__(self, *devices: torch.device | str, cpu: bool = True) -> None:
        found = list(dict.fromkeys(map(torch.device, devices)))
        self._devices = [device for device in found if device.type != "cpu"]
        self._cpu = cpu
        self._saved: list[tuple[torch.Generator, torch.Tensor]] | None = None
        for device in self._devices:
            if device.type == "meta" or not hasattr(torch.get_device_module(device), "default_generators"):
                raise ValueError(f"`devices` must be CPUs or accelerators with default generators, got {device}.")

    def seed(self, seed: int) -> None:
        """Start a shard: set the generators to the beginning of its stream.

        Args:
            seed: The seed of the stream, in 0..2³²-1, as `stream_seed` returns it.

        Raises:
            OrderError: If this is called outside of the ``with`` block.
            ValueError: If the seed is out of range.
        """
        if not 0 <= seed < NUM_SEEDS:
            check_seed(seed)
        if self._saved is None:
            raise OrderError("`DefaultStream.seed` must be called inside its `with` block.")
        for generator, _ in self._saved:
            generator.manual_seed(seed)

    def position(self) -> list[torch.Tensor]:
        """Return how far the generators have come, for `resume`."""
        return [generator.get_state() for generator, _ in self._saved or ()]

    def resume(self, position: Sequence[torch.Tensor]) -> None:
        """Continue from what `position` returned for the same devices.

        Args:
            position: The states of the generators.
        """
        for (generator, _), state in zip(self._saved or (), position, strict=True):
            generator.set_state(state)

    def __enter__(self) -> DefaultStream:
        if self._saved is not None:
            raise OrderError("A `DefaultStream` must be left before it is entered again.")
        generators = [DEFAULT_GENERATOR] if self._cpu else []
        for device in self._devices:
            module = torch.get_device_module(device)
            # "cuda" without an index stands for the current device, so the index has to be looked up.
            with module.device(device):
                generators.append(module.default_generators[module.current_device()])
        self._saved = list(zip(generators, map(torch.Generator.get_state, generators), strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        saved, self._saved = self._saved or [], None
        for generator, state in saved:
            generator.set_state(state)
