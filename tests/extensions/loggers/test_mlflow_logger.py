"""The file store of MLflow, read by MLflow's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions import MLflowLogger
from tests.extensions.loggers.runs import CONFIG, Curves, check_curves, stopped_run, whole_run

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)


def store(out: Path) -> str:
    return (out / "mlruns").as_uri()


def client(out: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=store(out))


def runs(out: Path) -> list[Any]:
    there = client(out)
    return list(there.search_runs([there.get_experiment_by_name("lockstep").experiment_id]))


def curves(out: Path) -> Curves:
    (run,) = runs(out)
    return {
        name: [(each.step, each.value) for each in client(out).get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", MLflowLogger(tracking_uri=store(tmp_path / "whole")))
    stopped_run(tmp_path / "stopped", lambda: MLflowLogger(tracking_uri=store(tmp_path / "stopped")))
    check_curves(curves(tmp_path / "stopped"), curves(tmp_path / "whole"))
    assert runs(tmp_path / "stopped")[0].info.status == "FINISHED"


def test_the_configuration_and_the_digest(tmp_path: Path) -> None:
    trainer = whole_run(tmp_path, MLflowLogger(tracking_uri=store(tmp_path), hyperparameters=CONFIG))
    (run,) = runs(tmp_path)
    assert run.data.params["width"] == "8"
    assert run.data.params["recipe.num_shards"] == "4"
    assert len(run.data.params["recipe_digest"]) == 64
    assert len(run.data.tags["digest.main"]) == 64
    path = client(tmp_path).download_artifacts(run.info.run_id, "config.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["recipe"] == trainer.updater.recipe_fields()


def test_with_another_rate_a_new_run_is_started(tmp_path: Path) -> None:
    stopped_run(tmp_path, lambda: MLflowLogger(tracking_uri=store(tmp_path)), lr=0.01)
    assert len(runs(tmp_path)) == 2
