"""Measure how fast the places are, and give them shards in that proportion."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from lockstep.plan import Shard

LOG = logging.getLogger("lockstep")

WARM_UP: Final = 3
"""Computations that are not measured: caches, kernels chosen at first use, threads that begin."""
MEASURED: Final = 10
"""Computations that are."""

Work = Sequence[Sequence[tuple[Shard, Any]]]
"""The shards of each place, with their arrays on its device."""


class DeviceTimer:
    """Time the places while the first batches are computed, then settle on workloads once.

    A place's workload is how many samples it computed in a second, relative to the mean over places. Where
    each shard runs changes no bit of a result whose number of shards is fixed, so nothing here is part of a
    run's state.

    Args:
        devices: Of the places.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._seconds = [0.0] * len(devices)
        self._samples = [0] * len(devices)
        self._computations = 0

    def timed(self, compute: Callable[[int], None], work: Work) -> Callable[[int], None]:
        """Give what runs one place's work and takes its time; after the last measurement the work itself."""
        self._computations += 1
        if not WARM_UP < self._computations <= WARM_UP + MEASURED:
            return compute

        def run(place: int) -> None:
            begin = time.perf_counter()
            compute(place)
            wait_for(self._devices[place])
            self._seconds[place] += time.perf_counter() - begin
            self._samples[place] += sum(len(shard.samples) for shard, _ in work[place])

        return run

    def workloads(self, now: list[float]) -> list[float]:
        """Give the workloads of the next computation: those there are until everything is measured."""
        if self._computations != WARM_UP + MEASURED:
            return now
        measured = [
            samples / seconds
            for samples, seconds in zip(self._samples, self._seconds, strict=True)
            if samples and seconds
        ]
        if not measured:
            return now
        # A place that had no shard so far is taken to be as fast as the others are on average.
        usual = sum(measured) / len(measured)
        speeds = [
            samples / seconds if samples and seconds else usual
            for samples, seconds in zip(self._samples, self._seconds, strict=True)
        ]
        LOG.info("Measured workloads, in samples per second: %s.", ", ".join(f"{speed:.1f}" for speed in speeds))
        return [speed / usual for speed in speeds]


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given, so that a clock tells how long that took."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
