"""The offline files of Weights & Biases, read as records of its own protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions import WandbLogger
from lockstep.program import describe_program
from tests.extensions.loggers.runs import CONFIG, Curves, check_curves, stopped_run, whole_run

wandb = pytest.importorskip("wandb")
proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.processes]

HEADER, BLOCK = 7, 32 * 1024
"""Sizes in bytes of the header of a file and of a block, in the record format of LevelDB's log."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name, value in {"SILENT": "true", "CONSOLE": "off", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "settings"))
    yield
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)


def records(path: Path) -> Iterator[Any]:
    data, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield proto.Record.FromString(parts)
            parts = b""


def files(out: Path) -> list[Path]:
    return sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))


def curves(paths: list[Path]) -> Curves:
    found: Curves = {}
    for record in (each for path in paths for each in records(path)):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = items.get("_step", record.history.step.num)
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((step, value))
    return found


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", WandbLogger())
    stopped_run(tmp_path / "stopped", WandbLogger)
    parts = files(tmp_path / "stopped")
    assert len(parts) == 2
    assert len({path.name for path in parts}) == 1
    check_curves(curves(parts), curves(files(tmp_path / "whole")))


def test_the_configuration_and_the_digest(tmp_path: Path) -> None:
    whole_run(tmp_path, WandbLogger(hyperparameters=CONFIG))
    (path,) = files(tmp_path)
    config, summary = dict[str, str](), dict[str, str]()
    for record in records(path):
        for source, found in ((record.run.config, config), (record.config, config), (record.summary, summary)):
            found.update({"/".join(each.nested_key) or each.key: each.value_json for each in source.update})
    assert json.loads(config["width"]) == 8
    assert json.loads(config["recipe"])["num_shards"] == 4
    assert "recipe_digest" in config
    assert json.loads(config["program"]) == describe_program()
    assert any("digest" in name for name in summary)
