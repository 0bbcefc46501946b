"""Record what a run is made of, where it ran, and where its time went."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch

from lockstep._version import __version__
from lockstep.communicators import kernel_class
from lockstep.digest import digest
from lockstep.extensions.loggers import recipe_digest, replace_file
from lockstep.integers import check_integer
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Clock, ParallelUpdater, Times

EVERY_ON_ACCELERATORS: Final = 50
"""By default every 50th update is measured on accelerators, since measuring waits for the device at each phase."""
LONGEST_ERROR: Final = 500
"""The number of characters of an error that are recorded."""


class RunRecord(Extension):
    """Writes ``run.jsonl``, from which ``lockstep report`` shows the recipe, the kernel class, retries and times.

    Each start or resume of the run adds an object with the key ``"session"``: the recipe and its SHA-256, the kernel
    class, the devices of each rank, versions and the time. Each interval adds one with the key ``"interval"``: the loss
    scale, the number of retries in it, the number of updates that changed the weights, and the seconds that the updates
    that were measured took, by phase for each rank and by phase for each device. At the end of a session follows one
    with the key ``"end"``: how it ended, and the digest of each model if it ended without an error.

    A run that resumes continues the file; a new run in the folder of an old one starts a new file. Rank 0 writes.

    Args:
        trigger: The trigger that ends an interval.
        every: The number of updates of which one is measured, at least 1. By default every update is measured on CPUs,
            which takes some tens of microseconds, and every 50th on other devices, which wait at the end of each phase
            then.
        filename: The file name, relative to the trainer's folder.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `every` is below 1.

    Determinism: measuring changes no bit of a result. Times differ between runs, which is why they are not logged with
    the observed values.
    """

    # After the extensions that observe, and before those that save.
    priority = READER - 1

    def __init__(
        self, *, trigger: TriggerSpec = (1, "epoch"), every: int | None = None, filename: str = "run.jsonl"
    ) -> None:
        if every is not None:
            check_integer("every", every, minimum=1)
        self.trigger = trigger
        self.every = every
        self.filename = filename
        self._path = Path(filename)
        self._clock: Clock | None = None
        self._start: Times | None = None
        self._times: list[Times] = []
        self._every = 1
        self._retries = 0
        self._recipe: dict[str, object] = {}
        self._error: BaseException | None = None

    def initialize(self, trainer: Trainer) -> None:
        """Begin a session, and begin to measure. Every rank must call this."""
        self._path, self._error = trainer.out / self.filename, None
        updater = trainer.updater
        on_cpu = all(device.type == "cpu" for device in updater.devices)
        self._every = self.every or (1 if on_cpu else EVERY_ON_ACCELERATORS)
        own = {"host": socket.gethostname(), "devices": [_device_name(each) for each in updater.devices]}
        ranks = _gather(trainer, own)
        self._recipe = updater.recipe_fields()
        if trainer.is_main:
            self._open(trainer)
            resumption = trainer.resumption
            self._write(
                "session",
                {
                    "lockstep": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "time": _now(),
                    "update": updater.iteration,
                    "resumed_from": None if resumption is None else str(resumption.path),
                    "ranks": ranks,
                    "recipe": self._recipe,
                    "recipe_digest": recipe_digest(self._recipe),
                    "kernel_class": kernel_class(updater.devices),
                },
            )
        # An updater of another kind has neither phases nor retries.
        if isinstance(updater, ParallelUpdater):
            self._clock = updater.clock
            self._start = self._clock.start()
            self._times, self._retries = [], updater.num_retries

    def collect(self, trainer: Trainer) -> None:
        """Measure the next update if it is due."""
        if self._clock is None:
            return
        if self._start is not None:
            self._times.append(self._clock.stop(self._start))
            self._start = None
        if trainer.updater.iteration % self._every == 0:
            self._start = self._clock.start()

    def __call__(self, trainer: Trainer) -> None:
        """End the interval, and write it. Every rank must call this."""
        updater = trainer.updater
        if self._clock is None or not isinstance(updater, ParallelUpdater):
            return
        times = reduce(Times.plus, self._times, self._clock.zero)
        ranks = _gather(trainer, {"seconds": times.seconds, "devices": times.device_seconds})
        if trainer.is_main:
            self._write(
                "interval",
                {
                    "update": updater.iteration,
                    "epoch": updater.epoch_detail,
                    "elapsed_time": trainer.elapsed_time,
                    "loss_scale": updater.loss_scale.factor,
                    "retries": updater.num_retries - self._retries,
                    "applied": updater.applied_updates,
                    "measured": len(self._times),
                    "ranks": ranks,
                },
            )
        self._times, self._retries = [], updater.num_retries

    def on_error(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002 - the interface
        """Record the error that ends the session."""
        self._error = error

    def finalize(self, trainer: Trainer) -> None:
        """End the session, and the last interval unless the run ended with an error."""
        try:
            # After an error, other ranks may not reach this call.
            if self._error is None and self._times:
                self(trainer)
        finally:
            if self._clock is not None and self._start is not None:
                self._clock.stop(self._start)
            self._clock = self._start = None
        if trainer.is_main:
            self._write("end", self._ending(trainer))

    def _ending(self, trainer: Trainer) -> dict[str, Any]:
        updater, error = trainer.updater, self._error
        ending: dict[str, Any] = {"time": _now(), "update": updater.iteration, "elapsed_time": trainer.elapsed_time}
        if error is not None:
            return {**ending, "error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        recipe = updater.recipe_fields()
        if recipe != self._recipe:
            # Lazy modules have a shape now.
            ending |= {"recipe": recipe, "recipe_digest": recipe_digest(recipe)}
        return {**ending, "digests": {name: digest(model) for name, model in updater.get_all_models().items()}}

    def _open(self, trainer: Trainer) -> None:
        """Keep the whole lines of an earlier session of this run, and no others."""
        source = trainer.resumption
        continues = trainer.updater.iteration > 0 and (source is None or source.same_run)
        data = self._path.read_bytes() if continues and self._path.exists() else b""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, data[: data.rfind(b"\n") + 1])

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a line in one call: a killed process leaves it complete or not at all."""
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps({kind: values}).encode() + b"\n")


def _gather(trainer: Trainer, own: Mapping[str, Any]) -> list[Any]:
    """Return the values of all ranks. Every rank must call this."""
    communicator = trainer.updater.communicator
    return [json.loads(each) for each in communicator.exchange(json.dumps(own).encode())]


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
