"""Write the observed values for MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.elsewhere import check_installed
from lockstep.extensions.loggers.logger import EPOCH, Logger
from lockstep.side_files import SideFile
from lockstep.trainer import Trainer

RUN_FILE = "mlflow-run.json"
MAX_BATCH = 100
"""The number of parameters that MLflow accepts in one call."""


class MLflowLogger(Logger):
    """Writes a run of MLflow, to a folder, a database or a server.

    Hyperparameters and the recipe, without the shapes of the models, are parameters of the run. The complete
    configuration is the artifact ``config.json``. A run that is resumed continues the run of MLflow that
    ``mlflow-run.json`` in the trainer's folder names. Entries that are not kept cannot be removed from it; a new one is
    started instead.

    Args:
        experiment: The name of the experiment, which is created if necessary.
        tracking_uri: The store to write to: ``"file:..."`` for a folder, ``"sqlite:///..."`` for a database, or the
            address of a server. By default the setting of MLflow.
        **options: The arguments of `Logger`.

    Attributes:
        client: The ``MlflowClient``, for artifacts and more; None before and after a run, and on other ranks.
        run_id: The identifier of the run of MLflow; empty before the run.

    Raises:
        ImportError: If mlflow is not installed.
    """

    def __init__(self, experiment: str = "lockstep", *, tracking_uri: str | None = None, **options: Any) -> None:
        check_installed("mlflow", extra="mlflow", user=type(self).__name__)
        super().__init__(**options)
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.client: Any = None
        self.run_id = ""
        self._entities: Any = None

    def open(self, trainer: Trainer, *, keep: float) -> int:
        """Create or continue a run."""
        self._entities = import_module("mlflow.entities")
        self.client = import_module("mlflow").MlflowClient(tracking_uri=self.tracking_uri)
        file = SideFile(trainer.out, RUN_FILE, required=self.required)
        self.run_id = str(file.read_json().get("id", "")) if keep else ""
        last = self._last_update() if self.run_id else 0
        if self.run_id and last <= keep:
            self.client.update_run(self.run_id, status="RUNNING")
            return last
        self.run_id = self._create_run(trainer.out)
        file.write_json({"id": self.run_id})
        return 0

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the parameters, and the complete configuration as an artifact."""
        recipe = {f"recipe.{name}": value for name, value in config["recipe"].items() if ".model." not in f".{name}"}
        values = {**config["hyperparameters"], **recipe, "recipe_digest": config["recipe_digest"]}
        params = [self._entities.Param(name, str(value)) for name, value in values.items()]
        for start in range(0, len(params), MAX_BATCH):
            self.client.log_batch(self.run_id, params=params[start : start + MAX_BATCH])
        self.client.log_dict(self.run_id, dict(config), "config.json")

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Log the values at the step of the update."""
        now = int(time.time() * 1000)
        # The epoch last: where it is, all other values of the update have been written.
        ordered = [name for name in values if name != EPOCH] + [EPOCH]
        metrics = [self._entities.Metric(name, float(values[name]), now, update) for name in ordered]
        self.client.log_batch(self.run_id, metrics=metrics)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Write the digests as tags of the run."""
        for name, text in summary["digest"].items():
            self.client.set_tag(self.run_id, f"digest.{name}", text)
        self.client.set_tag(self.run_id, "update", str(summary["update"]))

    def close(self, *, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self.client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")
        self.client = None

    def _last_update(self) -> int:
        """Return the last update of which all values are in the run."""
        return max((metric.step for metric in self.client.get_metric_history(self.run_id, EPOCH)), default=0)

    def _create_run(self, out: Path) -> str:
        """Create a run, named for the folder, and return its identifier."""
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = self.client.create_experiment(self.experiment) if found is None else found.experiment_id
        return str(self.client.create_run(experiment, run_name=out.resolve().name).info.run_id)
