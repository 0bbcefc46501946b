"""Write the observed values for Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lockstep.elsewhere import check_installed
from lockstep.extensions.loggers.logger import Logger
from lockstep.side_files import SideFile
from lockstep.trainer import Trainer

RUN_FILE = "wandb-run.json"


class WandbLogger(Logger):
    """Writes a run of Weights & Biases to the folder ``wandb`` in the trainer's folder; offline by default.

    Send an offline run to the service by ``wandb sync``. A run that is resumed has the same identifier, so that
    ``wandb sync`` continues its curves. The identifier and the last update are in ``wandb-run.json``, because the files
    of Weights & Biases are written by another process. Entries that are not kept cannot be removed from such a run; a
    new one is started instead.

    Args:
        project: The name of the project.
        mode: ``"offline"`` to write files only, or ``"online"`` to send them as well.
        init: Further arguments of ``wandb.init``, by name.
        **options: The arguments of `Logger`.

    Attributes:
        run: The ``wandb`` run, for images, histograms and more; None before and after a run, and on other ranks.

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(
        self,
        project: str = "lockstep",
        *,
        mode: Literal["offline", "online"] = "offline",
        init: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_installed("wandb", extra="wandb", user=type(self).__name__)
        super().__init__(**options)
        self.project = project
        self.mode = mode
        self.init = dict(init or {})
        self.run: Any = None
        self._file = SideFile(Path(), RUN_FILE, required=self.required)

    def open(self, trainer: Trainer, *, keep: float) -> int:
        """Start or continue a run."""
        self._file.folder = trainer.out
        SideFile(trainer.out, "wandb/run").check()
        known = self._file.read_json() if keep else {}
        if known and (type(known.get("id")), type(known.get("update"))) != (str, int):
            raise self._file.damaged("the file", "it must hold an id and an update")
        if not known or known["update"] > keep:
            known = {"id": secrets.token_hex(4), "update": 0}
        options = {"project": self.project, "name": trainer.out.resolve().name, "dir": str(trainer.out), **self.init}
        if self.mode == "online":
            options["resume"] = "allow"
        self.run = import_module("wandb").init(id=known["id"], mode=self.mode, **options)
        self._file.write_json(known)
        return int(known["update"])

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the hyperparameters as the configuration, beside the recipe, its digest and the program."""
        beside = {name: value for name, value in config.items() if name != "hyperparameters"}
        self.run.config.update({**config["hyperparameters"], **beside})

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Log the values at the step of the update."""
        # Without `commit`, they would be held back until the next step.
        self.run.log(dict(values), step=update, commit=True)
        self._file.write_json({"id": self.run.id, "update": update})

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Add the digests to the summary of the run."""
        self.run.summary.update({"update": summary["update"], "digest": dict(summary["digest"])})

    def close(self, *, failed: bool) -> None:
        """Wait until everything is written, and end the run."""
        self.run.finish(exit_code=int(failed))
        self.run = None
