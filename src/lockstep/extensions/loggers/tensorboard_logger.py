"""Write the observed values for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lockstep.elsewhere import check_installed
from lockstep.extensions.loggers.logger import EPOCH, Logger
from lockstep.side_files import SideFile
from lockstep.trainer import Trainer

EVENT_FILES: Final = "events.out.tfevents.*"


class TensorBoardLogger(Logger):
    """Writes event files for TensorBoard to a folder of the trainer's folder.

    The configuration is the text ``config``, and hyperparameters are shown on TensorBoard's page for them. All values
    of an update are one record, which a killed process leaves complete or not at all. Events that are not kept stay in
    their files, and TensorBoard does not show them.

    Args:
        folder: The folder of the event files, relative to the trainer's folder.
        **options: The arguments of `Logger`.

    Attributes:
        writer: The `torch.utils.tensorboard.SummaryWriter`, for images, histograms and more; None between runs and
            on other ranks.

    Raises:
        ImportError: If tensorboard is not installed.
    """

    def __init__(self, folder: str = "tensorboard", **options: Any) -> None:
        check_installed("tensorboard", extra="tensorboard", user=type(self).__name__)
        super().__init__(**options)
        self.folder = folder
        self.writer: Any = None
        self._path = Path(folder)
        self._purge_step: int | None = None

    def initialize(self, trainer: Trainer) -> None:
        """Check that the event files are regular files, if there are any."""
        self._path = trainer.out / self.folder
        for name in ("events", *(file.name for file in self._path.glob(EVENT_FILES))):
            SideFile(trainer.out, Path(self.folder, name)).check()

    def open(self, trainer: Trainer, *, keep: float) -> int:  # noqa: ARG002 - the interface
        """Open a new event file, and hide the events that are not kept."""
        last = _last_update(self._path)
        self._purge_step = None
        if last > keep or (last >= 0 and not keep):
            # Everything from this step on, also the configuration at step 0 where nothing is kept.
            self._purge_step = int(keep) + 1 if keep else 0
            last = int(keep)
        self._attempt(self._open_file)
        return max(last, 0)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as a text, and the hyperparameters for their page."""
        self._open_file()
        self.writer.add_text("config", _as_code(config))
        if config["hyperparameters"]:
            summary = import_module("torch.utils.tensorboard.summary")
            for each in summary.hparams(dict(config["hyperparameters"]), {}):
                self.writer.file_writer.add_summary(each)

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Write all values of an update as one event."""
        summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        scalars = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._open_file()
        self.writer.file_writer.add_summary(summary(value=scalars), update)
        # A process that is killed would lose what is in the queue.
        self.flush()

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as a text."""
        self._open_file()
        self.writer.add_text("summary", _as_code(summary), summary["update"])

    def flush(self) -> None:
        """Write what is in the queue."""
        if self.writer is not None:
            try:
                self.writer.flush()
            except OSError:
                # Its thread has ended, and its file may end with a part of a record. What follows needs a new one.
                self.writer = None
                raise

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - event files have no place for it
        """Write what is in the queue, and close the file."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    def _open_file(self) -> None:
        """Open a new event file, unless one is open."""
        if self.writer is None:
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self.writer = writer(str(self._path), purge_step=self._purge_step)
            self._purge_step = None


def _last_update(folder: Path) -> int:
    """Return the last update in the event files of a folder; 0 if there are events without one, -1 without a file."""
    files = sorted(folder.glob(EVENT_FILES))
    if not files:
        return -1
    last = 0
    loader = import_module("tensorboard.backend.event_processing.event_file_loader").EventFileLoader
    for file in files:
        # Ends without an error at a record that is not whole.
        for event in loader(str(file)).Load():
            if event.HasField("session_log"):
                last = min(last, max(event.step - 1, 0))
            # Other events, such as your own images, may be ahead of the entries.
            elif any(value.tag == EPOCH for value in event.summary.value):
                last = max(last, event.step)
    return last


def _as_code(value: Mapping[str, Any]) -> str:
    """Return JSON as Markdown that keeps its line breaks."""
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=1).splitlines())
