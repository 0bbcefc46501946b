"""Measure how long each device computes, and assign shards in proportion to the speeds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from lockstep.plan import Shard

LOG = logging.getLogger("lockstep")

UNTIMED_COMPUTATIONS: Final = 3
"""The number of computations before the first timed one, in which caches fill, kernels are chosen and threads start."""
TIMED_COMPUTATIONS: Final = 10
"""The number of computations that are timed."""

DeviceShards = Sequence[Sequence[tuple[Shard, Any]]]
"""The shards of each device, each with its tensors on that device."""


class DeviceTimer:
    """Time the devices during the first computations, then choose their workloads once.

    The workload of a device is the number of samples it computes per second, relative to the mean over devices. With a
    fixed number of shards the result does not depend on where each shard runs, so none of this is saved with the state
    of a run.

    Args:
        devices: The devices to time.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._seconds = [0.0] * len(devices)
        self._samples = [0] * len(devices)
        self._computations = 0

    def timed(self, compute: Callable[[int], None], device_shards: DeviceShards) -> Callable[[int], None]:
        """Return a function that runs one device's work and times it; once everything is measured, the work itself.

        Args:
            compute: Called with the index of a device; runs the work of that device.
            device_shards: The shards of each device, whose samples are counted.
        """
        self._computations += 1
        if not UNTIMED_COMPUTATIONS < self._computations <= UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS:
            return compute

        def run(place: int) -> None:
            # Each device writes only its own entries, so the threads need no lock.
            start = time.perf_counter()
            compute(place)
            # An accelerator still works when `compute` returns, and the clock must not stop before it.
            synchronize(self._devices[place])
            self._seconds[place] += time.perf_counter() - start
            self._samples[place] += sum(len(shard.samples) for shard, _ in device_shards[place])

        return run

    def next_workloads(self, current: list[float]) -> list[float]:
        """Return the workloads of the next computation: the current ones until all timed computations are done.

        Args:
            current: The workloads of the computation that has just ended.
        """
        # The workloads change exactly once, after the last timed computation.
        if self._computations != UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS:
            return current
        measured = [
            samples / seconds
            for samples, seconds in zip(self._samples, self._seconds, strict=True)
            if samples and seconds
        ]
        if not measured:
            return current
        # A device without shards so far is assumed to be as fast as the others are on average.
        usual = sum(measured) / len(measured)
        speeds = [
            samples / seconds if samples and seconds else usual
            for samples, seconds in zip(self._samples, self._seconds, strict=True)
        ]
        LOG.info("Measured workloads, in samples per second: %s.", ", ".join(f"{speed:.1f}" for speed in speeds))
        return [speed / usual for speed in speeds]


class BusyTimer:
    """Add up the seconds in which each device computes shards.

    Args:
        devices: The devices of this process.

    Attributes:
        seconds: The seconds of each device, which are never set back.
        num_users: The number of objects that want the next computations to be timed; each adds itself and leaves again.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.seconds = [0.0] * len(devices)
        self.num_users = 0

    def timed(self, compute: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that runs one device's work and times it, for which it waits for accelerators.

        Args:
            compute: Called with the index of a device; runs the work of that device.
        """

        def run(place: int) -> None:
            start = time.perf_counter()
            compute(place)
            synchronize(self._devices[place])
            self.seconds[place] += time.perf_counter() - start

        return run


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its queued work, so that a clock measures it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
