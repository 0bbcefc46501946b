"""Observe how fast a run is, and how much memory its devices use."""

from __future__ import annotations

import time
import warnings

import torch

from lockstep.metrics import Mean
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec


class Throughput(Extension):
    """Observes updates, and samples or tokens, per second, and the memory of GPUs, since it last did.

    The names are ``"throughput/updates"``, ``"throughput/samples"`` for the weights of the loss, and
    ``"throughput/memory/cuda:0"`` for the largest number of bytes that tensors took on a device. The weight of a loss
    is the number of samples, or of tokens with `token_mean`, and 1 if the loss is a sum. The time includes that of
    other extensions. If nothing observes these weights, a warning says so, and their rate is left out.

    Args:
        weight_of: The name of the observed mean whose weights are counted; with several models in a step function, that
            of one of them, such as ``"main/gen/loss"``.
        label: The last part of the name for the counted weights, such as ``"tokens"``.
        trigger: The trigger that decides when to observe them.

    With several processes, the counts are those of the whole batch, and time and memory those of each process.
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

    def initialize(self, trainer: Trainer) -> None:
        """Begin to count."""
        self._restart(trainer)

    def collect(self, trainer: Trainer) -> None:
        """Count the update and its weight; nothing is read from the device."""
        self._updates += 1
        value = trainer.observation.get(self.weight_of)
        if isinstance(value, Mean):
            self._weight = value.weight if self._weight is None else self._weight + value.weight

    def __call__(self, trainer: Trainer) -> None:
        """Observe the rates and the memory."""
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
        for device in trainer.updater.devices:
            if device.type == "cuda":
                trainer.observe(f"throughput/memory/{device}", torch.cuda.max_memory_allocated(device))
        self._restart(trainer)

    def _restart(self, trainer: Trainer) -> None:
        """Count from now on."""
        for device in trainer.updater.devices:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
        self._since, self._updates, self._weight = time.perf_counter(), 0, None
