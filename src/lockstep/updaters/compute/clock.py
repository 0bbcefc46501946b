"""Measure how long each phase of updates takes, and how long each device computes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.communicators import Watch
from lockstep.updaters.setup.batches import DeviceShards

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


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds that a clock has added up.

    Attributes:
        seconds: The seconds in each phase of the calling thread.
        device_seconds: The seconds in each phase of each device, in order of devices.
    """

    seconds: Mapping[str, float]
    device_seconds: Sequence[Mapping[str, float]]

    def plus(self, other: Times, factor: int = 1) -> Times:
        """Return the sum of these times and others, which are multiplied by a factor first."""

        def add(seconds: Mapping[str, float], more: Mapping[str, float]) -> Mapping[str, float]:
            return {phase: value + factor * more[phase] for phase, value in seconds.items()}

        return Times(add(self.seconds, other.seconds), list(map(add, self.device_seconds, other.device_seconds)))

    @property
    def busy_seconds(self) -> list[float]:
        """The seconds in which each device computed shards."""
        return [sum(seconds.values()) for seconds in self.device_seconds]


@dataclass(slots=True)
class _Activity:
    """What a thread is doing, and since when.

    Attributes:
        seconds: The seconds in each phase so far.
        devices: The devices that are waited for at the end of a phase.
        phase: The phase.
        since: When it began.
    """

    seconds: dict[str, float]
    devices: Sequence[torch.device]
    phase: str
    since: float = 0.0

    def enter(self, phase: str) -> None:
        """End the phase, and begin another one."""
        for device in self.devices:
            # An accelerator has queued work, whose time would count for another phase.
            if device.type not in {"cpu", "meta"}:
                torch.accelerator.synchronize(device)
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now


class Clock(Watch):
    """A watch that also measures time while it has users: code that enters a phase sets `phase`.

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
        num_users: The number of users.
        zero: Times of 0 seconds.
    """

    def __init__(self, watch: Watch, devices: Sequence[torch.device]) -> None:
        self._watch = watch
        self._devices = devices
        self._on_devices: dict[int, _Activity] = {}
        self.num_users = 0
        self._thread = threading.get_ident()
        self._main = _Activity(dict.fromkeys(PHASES.values(), 0.0), devices, BETWEEN)
        self._device_seconds = [dict.fromkeys(DEVICE_PHASES, 0.0) for _ in devices]
        self.zero = self._times()

    def start(self) -> Times:
        """Measure for one user more, and return what to pass to `stop`.

        Call both between updates, or between the phases of one, in the thread that runs them.
        """
        self.num_users += 1
        if self.num_users == 1:
            self._thread = threading.get_ident()
            self._main.phase, self._main.since = BETWEEN, time.perf_counter()
        return self._read()

    def stop(self, start: Times) -> Times:
        """Measure for one user less, and return the times since its `start`."""
        now = self._read()
        self.num_users -= 1
        return now.plus(start, -1)

    def _read(self) -> Times:
        """Return all times up to this moment."""
        self._main.enter(self._main.phase)
        return self._times()

    def _times(self) -> Times:
        return Times(dict(self._main.seconds), [dict(seconds) for seconds in self._device_seconds])

    @property
    def phase(self) -> str:
        """What this rank is doing; see `Watch`."""
        return self._watch.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._watch.phase = phase
        if not self.num_users:
            return
        thread = threading.get_ident()
        device = self._on_devices.get(thread)
        if device is not None and phase in DEVICE_PHASES:
            device.enter(phase)
        elif thread == self._thread and PHASES.get(phase, BETWEEN) != self._main.phase:
            self._main.enter(PHASES.get(phase, BETWEEN))

    def timed(self, compute: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that runs the work of one device and measures it.

        Args:
            compute: Called with the index of a device; runs the work of that device.
        """
        if not self.num_users:
            return compute
        self._main.enter(COMPUTE)

        def run(place: int) -> None:
            # Threads of several devices add only entries of their own.
            thread = threading.get_ident()
            own, device = self._device_seconds[place], self._devices[place]
            self._on_devices[thread] = activity = _Activity(own, [device], DEVICE_PHASES[0], time.perf_counter())
            try:
                compute(place)
            finally:
                activity.enter(DEVICE_PHASES[0])
                del self._on_devices[thread]

        return run


class Stopwatch:
    """Adds up the times of stretches of a run, such as those of the updates that are measured.

    Args:
        clock: The clock that measures, of which a stretch is one user.

    Attributes:
        times: The sum over the stretches since `clear`.
        num_stretches: Their number.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start: Times | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the stretches that have ended."""
        self.times, self.num_stretches = self._clock.zero, 0

    def start(self) -> None:
        """Begin a stretch."""
        self._start = self._clock.start()

    def stop(self) -> None:
        """End the stretch that has begun, if there is one."""
        if self._start is not None:
            self.times, self.num_stretches = self.times.plus(self._clock.stop(self._start)), self.num_stretches + 1
            self._start = None


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
        self._stopwatch = Stopwatch(clock)
        self._computations = 0
        self._samples = [0] * num_devices
        self.found: list[float] | None = None

    def start_computation(self) -> None:
        """Count a computation that is about to begin, and start the clock for the first timed one."""
        self._computations += 1
        if self._computations == 1 + UNTIMED_COMPUTATIONS:
            self._stopwatch.start()

    def end_computation(self, device_shards: DeviceShards) -> None:
        """Count the samples of a computation, and stop the clock after the last timed one.

        Args:
            device_shards: The shards that each device has computed.
        """
        if self._computations <= UNTIMED_COMPUTATIONS or self.found is not None:
            return
        for place, shards in enumerate(device_shards):
            self._samples[place] += sum(len(shard.samples) for shard, _ in shards)
        if self._computations >= UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS:
            self._stopwatch.stop()
            self.found = [
                samples / busy if samples and busy else 0.0
                for samples, busy in zip(self._samples, self._stopwatch.times.busy_seconds, strict=True)
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
