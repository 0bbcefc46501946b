"""Measure how long each phase of updates takes, and how long each device computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.communicators import Watch
from lockstep.updaters.compute.device_timer import synchronize

DATA: Final = "data"
COMPUTE: Final = "compute"
BETWEEN: Final = "between updates"

PHASES: Final[Mapping[str, str]] = {
    "data loading": DATA,
    "forward": COMPUTE,
    "backward": COMPUTE,
    "reduce": "reduce",
    "optimizer": "optimizer",
    "end": BETWEEN,
    "evaluation": BETWEEN,
}
"""The phases of the thread that calls `update`, by the names that a `Watch` gets."""
DEVICE_PHASES: Final = ("forward", "backward")
"""The phases of a device while it computes shards."""


@dataclass(slots=True)
class _DeviceClock:
    """What a device is doing, and since when."""

    place: int
    phase: str
    since: float


class PhaseTimer(Watch):
    """A watch that also measures time: it learns of each phase because code that enters one sets `phase`.

    The phases of the calling thread add up to the time between `start` and `stop`: ``"data"`` is waiting for a batch,
    cutting it and copying it to devices; ``"compute"`` forward and backward of all shards; ``"reduce"`` the sum over
    devices and ranks and its check; ``"optimizer"`` the step; ``"between updates"`` everything else, such as
    extensions. In a step function, the time of its own code counts for the phase before it.

    While it measures, it waits for an accelerator at the end of each phase, because otherwise the time would be that of
    queueing kernels.

    Args:
        watch: The watch that is told the phases, too.
        devices: The devices of this process.

    Attributes:
        is_timing: Whether it measures now.
        seconds: The seconds in each phase of the calling thread.
        device_seconds: The seconds in each phase of each device, in order of devices.
    """

    def __init__(self, watch: Watch, devices: Sequence[torch.device]) -> None:
        self._watch = watch
        self._devices = devices
        self._clocks: dict[int, _DeviceClock] = {}
        self._thread = threading.get_ident()
        self._phase, self._since = BETWEEN, 0.0
        self.is_timing = False
        self.clear()

    def clear(self) -> None:
        """Begin to add up from zero."""
        self.seconds = dict.fromkeys(PHASES.values(), 0.0)
        self.device_seconds = [dict.fromkeys(DEVICE_PHASES, 0.0) for _ in self._devices]

    def start(self) -> None:
        """Begin to measure; call it between updates, in the thread that runs them."""
        self._thread = threading.get_ident()
        self._phase, self._since = BETWEEN, time.perf_counter()
        self.is_timing = True

    def stop(self) -> None:
        """End measuring, after `start`."""
        self._enter(BETWEEN)
        self.is_timing = False

    @property
    def phase(self) -> str:
        """What this rank is doing; see `Watch`."""
        return self._watch.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._watch.phase = phase
        if not self.is_timing:
            return
        thread = threading.get_ident()
        clock = self._clocks.get(thread)
        if clock is not None and phase in DEVICE_PHASES:
            self._enter_on_device(clock, phase)
        elif thread == self._thread and PHASES.get(phase, BETWEEN) != self._phase:
            self._enter(PHASES.get(phase, BETWEEN))

    def timed(self, compute: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that runs the work of one device and measures it.

        Args:
            compute: Called with the index of a device; runs the work of that device.
        """
        if not self.is_timing:
            return compute
        self._enter(COMPUTE)

        def run(place: int) -> None:
            # Threads of several devices add only entries of their own.
            thread = threading.get_ident()
            self._clocks[thread] = clock = _DeviceClock(place, DEVICE_PHASES[0], time.perf_counter())
            try:
                compute(place)
            finally:
                self._enter_on_device(clock, DEVICE_PHASES[0])
                del self._clocks[thread]

        return run

    def _enter(self, phase: str) -> None:
        for device in self._devices:
            synchronize(device)
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _enter_on_device(self, clock: _DeviceClock, phase: str) -> None:
        synchronize(self._devices[clock.place])
        now = time.perf_counter()
        self.device_seconds[clock.place][clock.phase] += now - clock.since
        clock.phase, clock.since = phase, now
