"""Measure how fast each device computes during the first updates, for ``workloads="auto"``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from lockstep.updaters.compute.clock import Clock, Times
from lockstep.updaters.setup import DeviceShards

LOG = logging.getLogger("lockstep")

UNTIMED_COMPUTATIONS: Final = 3
"""The number of computations before the first timed one, in which caches fill, kernels are chosen and threads start."""
TIMED_COMPUTATIONS: Final = 10
"""The number of computations that are timed."""


class MeasuredSpeeds:
    """Measures the speeds of the devices of this process once, in samples per second.

    With a fixed number of shards the result does not depend on where each shard runs, so none of this is saved with the
    state of a run.

    Args:
        clock: Measures how long the devices compute.
        num_devices: The number of devices.

    Attributes:
        found: The speed of each device, 0 for one that had no shards; None until it is measured.
    """

    def __init__(self, clock: Clock, num_devices: int) -> None:
        self._clock = clock
        self._computations = 0
        self._samples = [0] * num_devices
        self._start: Times | None = None
        self.found: list[float] | None = None

    def start_computation(self) -> None:
        """Count a computation that is about to begin, and start the clock for the first timed one."""
        self._computations += 1
        if self._computations == 1 + UNTIMED_COMPUTATIONS:
            self._start = self._clock.start()

    def end_computation(self, device_shards: DeviceShards) -> None:
        """Count the samples of a computation, and stop the clock after the last timed one.

        Args:
            device_shards: The shards that each device has computed.
        """
        if self._start is None:
            return
        for place, shards in enumerate(device_shards):
            self._samples[place] += sum(len(shard.samples) for shard, _ in shards)
        if self._computations >= UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS:
            seconds = self._clock.stop(self._start).busy_seconds
            self._start = None
            self.found = [
                samples / busy if samples and busy else 0.0
                for samples, busy in zip(self._samples, seconds, strict=True)
            ]
            LOG.info("Measured speeds, in samples per second: %s.", ", ".join(f"{each:.1f}" for each in self.found))


def workloads_of(speeds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the workloads that follow from the measured speeds of the devices of all ranks.

    They are the speeds relative to their mean. A device that had no shards counts as one of mean speed.

    >>> workloads_of([[30.0, 0.0], [10.0]])
    [[1.5, 1.0], [0.5]]
    """
    measured = [speed for devices in speeds for speed in devices if speed]
    usual = sum(measured) / len(measured) if measured else 1.0
    return [[speed / usual if speed else 1.0 for speed in devices] for devices in speeds]
