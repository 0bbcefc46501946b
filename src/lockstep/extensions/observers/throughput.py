"""Observe how fast a run is, how busy its devices are, and how much memory they use."""

from __future__ import annotations

import time
import warnings

import torch

from lockstep.metrics import Mean
from lockstep.replicas import peak_memory, restart_peak_memory
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Clock, ParallelUpdater, Times


class Throughput(Extension):
    """Observes updates, and samples or tokens, per second, and the load and memory of devices, since it last did.

    The names are:

    * ``"throughput/updates"``, and ``"throughput/samples"`` for the weights of the loss. The weight of a loss is the
      number of samples, or of tokens with `token_mean`, and 1 if the loss is a sum. If nothing observes these weights,
      a warning says so, and their rate is left out. The time includes that of other extensions.
    * ``"throughput/load/device0"`` and so on, in the order of the updater's devices: the share of the time in which the
      device computed shards, in [0, 1]. The rest is the sum over devices, the optimizer, data and extensions. On CPUs
      every update is measured. Elsewhere the second update of an interval stands for all of them, because measuring
      waits for the device; in an interval of a single update, the load is left out.
    * ``"throughput/memory/cuda:0"``, the largest number of bytes that tensors took on the device, on accelerators that
      count it; ``"throughput/memory/cpu"``, the largest resident memory of the process since it began, on Linux and
      macOS.

    Args:
        weight_of: The name of the observed mean whose weights are counted; with several models in a step function, that
            of one of them, such as ``"main/gen/loss"``.
        label: The last part of the name for the counted weights, such as ``"tokens"``.
        trigger: The trigger that decides when to observe them.

    With several processes, the counts are those of the whole batch, and time, load and memory those of each process.
    """

    priority = WRITER

    def __init__(
        self, weight_of: str = "main/loss", *, label: str = "samples", trigger: TriggerSpec = (1, "epoch")
    ) -> None:
        self.weight_of = weight_of
        self.label = label
        self.trigger = trigger
        self._since = 0.0
        self._updates = 0
        self._weight: float | torch.Tensor | None = None
        self._warned = False
        self._load: _DeviceLoad | None = None

    def initialize(self, trainer: Trainer) -> None:
        """Begin to count."""
        # An updater of another kind has no devices that compute shards.
        updater = trainer.updater
        self._load = _DeviceLoad(updater.clock, updater.devices) if isinstance(updater, ParallelUpdater) else None
        self._restart(trainer)

    def collect(self, trainer: Trainer) -> None:
        """Count the update and its weight; nothing is read from the device."""
        self._updates += 1
        if self._load is not None:
            self._load.end_update(self._updates)
        value = trainer.observation.get(self.weight_of)
        if isinstance(value, Mean):
            self._weight = value.weight if self._weight is None else self._weight + value.weight

    def __call__(self, trainer: Trainer) -> None:
        """Observe the rates, the load and the memory."""
        # Before the clock: reading waits for the work that is still on the device.
        weight = None if self._weight is None else float(self._weight)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        trainer.observe("throughput/updates", self._updates / seconds)
        if weight is not None:
            trainer.observe(f"throughput/{self.label}", weight / seconds)
        elif not self._warned and trainer.is_main:
            self._warned = True
            warnings.warn(
                f"`weight_of` must name an observed mean, got {self.weight_of!r}, so Throughput leaves out the rate of "
                f"{self.label}. Values that are observed: {', '.join(sorted(trainer.observation))}.",
                stacklevel=2,
            )
        for index, share in enumerate([] if self._load is None else self._load.shares(seconds / self._updates)):
            trainer.observe(f"throughput/load/device{index}", share)
        for device in dict.fromkeys(trainer.updater.devices):
            memory = peak_memory(device)
            if memory is not None:
                trainer.observe(f"throughput/memory/{device}", memory)
        self._restart(trainer)

    def finalize(self, trainer: Trainer) -> None:  # noqa: ARG002 - the interface
        """Measure no longer."""
        if self._load is not None:
            self._load.stop()
            self._load = None

    def _restart(self, trainer: Trainer) -> None:
        """Count from now on."""
        for device in trainer.updater.devices:
            restart_peak_memory(device)
        if self._load is not None:
            self._load.restart()
        self._since, self._updates, self._weight = time.perf_counter(), 0, None


class _DeviceLoad:
    """Measures how long devices compute: in every update on CPUs, else in the second one of an interval.

    The first update of an interval may be the first of the run, which chooses kernels and starts threads.
    """

    def __init__(self, clock: Clock, devices: tuple[torch.device, ...]) -> None:
        self._clock = clock
        self._always = all(device.type == "cpu" for device in devices)
        self._start: Times | None = None
        self._measured = 0
        self._busy = [0.0] * len(devices)

    def restart(self) -> None:
        """Begin an interval."""
        self.stop()
        self._measured, self._busy = 0, [0.0] * len(self._busy)
        if self._always:
            self._start = self._clock.start()

    def end_update(self, number: int) -> None:
        """End an update, by its number in the interval, from 1, and begin another one."""
        self._measured += self._start is not None
        self.stop()
        if self._always or number == 1:
            self._start = self._clock.start()

    def shares(self, seconds: float) -> list[float]:
        """Return the share of the time of each device, if an update takes this long; none if none was measured."""
        if not self._measured:
            return []
        # One update that stands for others may have been slower than they were.
        return [min(each / self._measured / seconds, 1.0) for each in self._busy]

    def stop(self) -> None:
        """End measuring."""
        if self._start is not None:
            times = self._clock.stop(self._start)
            self._busy = [before + more for before, more in zip(self._busy, times.busy_seconds, strict=True)]
            self._start = None
