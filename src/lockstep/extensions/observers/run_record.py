"""Record what a run is made of, where it ran, and where its time went."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from lockstep._version import __version__
from lockstep.arguments import check_bool, check_integer
from lockstep.communicators import kernel_class
from lockstep.digest import digest
from lockstep.extensions.loggers.logger import last_kept, recipe_of
from lockstep.program import PROGRAM, describe_program
from lockstep.side_files import SideFile
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import ParallelUpdater, Stopwatch

EVERY_ON_ACCELERATORS: Final = 50
"""By default every 50th update is measured on accelerators, since measuring waits for the device at each phase."""
LONGEST_ERROR: Final = 500
"""The number of characters of an error that are recorded."""


@dataclass(eq=False, repr=False)
class RunRecord(Extension):
    """Writes ``run.jsonl``, from which ``lockstep report`` shows the recipe, the kernel class, retries and times.

    Each start or resume of the run adds an object with the key ``"session"``: the recipe and its SHA-256, the kernel
    class, the devices of each rank, versions, the program that runs and the time. Each interval adds one with the key
    ``"interval"``: the loss scale, the number of retries in it, the number of updates that changed the weights, and the
    seconds that the updates that were measured took, by phase for each rank and by phase for each device. At the end of
    a session follows one with the key ``"end"``: how it ended, and the digest of each model if it ended without an
    error.

    A run that resumes continues the file; a new run in the folder of an old one starts a new file. Rank 0 writes, from
    the first update on. What cannot be written is a `SideFileWarning`, and is written with a later line.

    Args:
        trigger: The trigger that ends an interval.
        every: The number of updates of which one is measured, at least 1. By default every update is measured on CPUs,
            which takes some tens of microseconds, and every 50th on other devices, which wait at the end of each phase
            then.
        filename: The file name, relative to the trainer's folder.
        required: Whether a line that cannot be written ends the run by a `SideFileError`.

    Raises:
        SideFileError: At the start of a run, if the file is no regular file.
        TypeError: If a number is not an integer.
        ValueError: If `every` is below 1.

    Determinism: measuring changes no bit of a result. Times differ between runs, which is why they are not logged with
    the observed values.
    """

    # After the extensions that observe, and before those that save.
    priority = READER - 1
    acts_together = True

    _: KW_ONLY
    trigger: TriggerSpec = (1, "epoch")
    every: int | None = None
    filename: str = "run.jsonl"
    required: bool = False

    def __post_init__(self) -> None:
        if self.every is not None:
            check_integer("every", self.every, minimum=1)
        check_bool("required", self.required)
        self._file = SideFile(Path(), self.filename, required=self.required)
        self._begun_at = 0
        self._stopwatch: Stopwatch | None = None
        self._every = 1
        self._retries = 0
        self._recipe: dict[str, Any] = {}

    def initialize(self, trainer: Trainer) -> None:
        """Begin a session, and begin to measure. Every rank must call this."""
        updater = trainer.updater
        self._begun_at = updater.iteration
        on_cpu = all(device.type == "cpu" for device in updater.devices)
        self._every = self.every or (1 if on_cpu else EVERY_ON_ACCELERATORS)
        own = {"host": socket.gethostname(), "devices": [_device_name(each) for each in updater.devices]}
        ranks = updater.communicator.exchange_json(own)
        self._recipe = recipe_of(updater)
        if trainer.is_main:
            resumption = trainer.resumption
            session = {
                "lockstep": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                PROGRAM: describe_program(),
                "time": _now(),
                "update": updater.iteration,
                "resumed_from": None if resumption is None else str(resumption.path),
                "ranks": ranks,
                **self._recipe,
                "kernel_class": kernel_class(updater.devices),
            }
            self._begin(trainer)
            # Not written before the first update, because the start may still be refused.
            self._file.add(_line("session", session))
        # An updater of another kind has neither phases nor retries.
        if isinstance(updater, ParallelUpdater):
            self._stopwatch, self._retries = Stopwatch(updater.clock), updater.num_retries
            self._stopwatch.start()

    def collect(self, trainer: Trainer) -> None:
        """Measure the next update if it is due, and write the session after the first one."""
        if trainer.is_main and trainer.updater.iteration == self._begun_at + 1:
            self._file.write()
        if self._stopwatch is not None:
            self._stopwatch.stop()
            if trainer.updater.iteration % self._every == 0:
                self._stopwatch.start()

    def __call__(self, trainer: Trainer) -> None:
        """End the interval, and write it. Every rank must call this."""
        updater, stopwatch = trainer.updater, self._stopwatch
        if stopwatch is None or not isinstance(updater, ParallelUpdater):
            return
        times = stopwatch.times
        ranks = updater.communicator.exchange_json({"seconds": times.seconds, "devices": times.device_seconds})
        if trainer.is_main:
            interval = {
                "update": updater.iteration,
                "epoch": updater.epoch_detail,
                "elapsed_time": trainer.elapsed_time,
                "loss_scale": updater.loss_scale.factor,
                "retries": updater.num_retries - self._retries,
                "applied": updater.applied_updates,
                "measured": stopwatch.num_stretches,
                "ranks": ranks,
            }
            self._file.append(_line("interval", interval))
        stopwatch.clear()
        self._retries = updater.num_retries

    def finalize(self, trainer: Trainer) -> None:
        """End the session, and the last interval unless the run ended with an error."""
        try:
            # After an error, other ranks may not reach this call.
            if trainer.error is None and self._stopwatch is not None and self._stopwatch.num_stretches:
                self(trainer)
        finally:
            if self._stopwatch is not None:
                self._stopwatch.stop()
            self._stopwatch = None
        # A start that is refused leaves the record of an earlier run as it is.
        if trainer.is_main and (trainer.error is None or trainer.updater.iteration > self._begun_at):
            self._file.add(_line("end", self._ending(trainer)))
            self._file.write(durable=True)

    def _ending(self, trainer: Trainer) -> dict[str, Any]:
        updater, error = trainer.updater, trainer.error
        ending: dict[str, Any] = {"time": _now(), "update": updater.iteration, "elapsed_time": trainer.elapsed_time}
        if error is not None:
            return {**ending, "error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        recipe = recipe_of(updater)
        if recipe != self._recipe:
            # Lazy modules have a shape now.
            ending |= recipe
        return {**ending, "digests": {name: digest(model) for name, model in updater.get_all_models().items()}}

    def _begin(self, trainer: Trainer) -> None:
        """Keep the whole lines of an earlier session of this run, and no others."""
        self._file.folder = trainer.out
        data = self._file.read() or b""
        self._file.begin(data[: data.rfind(b"\n") + 1] if last_kept(trainer) else b"")


def _line(kind: str, values: Mapping[str, Any]) -> bytes:
    return json.dumps({kind: values}).encode() + b"\n"


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
