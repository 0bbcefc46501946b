"""The table of a run: exact values, whole rows, one curve after a resume, and new columns."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.errors import StateError
from lockstep.extensions import CSVLogger, LogReport
from lockstep.program import describe_program
from lockstep.trainer import Trainer
from tests.extensions.loggers.runs import CONFIG, UPDATES, Curves, build, check_curves, stopped_run, whole_run
from tests.support.plain_updaters import CountingUpdater


def curves(path: Path) -> Curves:
    found: Curves = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell and name != "update":
                    found.setdefault(name, []).append((int(row["update"]), float(cell)))
    return found


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", CSVLogger())
    stopped_run(tmp_path / "stopped", CSVLogger)
    check_curves(curves(tmp_path / "stopped/metrics.csv"), curves(tmp_path / "whole/metrics.csv"))


def test_values_are_those_of_the_log(tmp_path: Path) -> None:
    trainer = build(tmp_path, CSVLogger(), 12)
    report = LogReport(trigger=(2, "iteration"))
    trainer.extend(report)
    trainer.run()
    logged = [(entry["iteration"], entry["main/loss"]) for entry in report.log]
    assert curves(tmp_path / "metrics.csv")["main/loss"] == logged


def test_the_configuration_and_the_digest(tmp_path: Path) -> None:
    trainer = whole_run(tmp_path, CSVLogger(hyperparameters=CONFIG))
    config = json.loads((tmp_path / "metrics.json").read_text())
    assert config["hyperparameters"] == {**CONFIG, "shape": "(1, 2)"}
    assert config["recipe"] == trainer.updater.recipe_fields()
    assert len(config["recipe_digest"]) == 64
    assert config["program"] == describe_program()
    model = trainer.updater.get_all_models()["main"]
    assert config["summary"] == {"update": 13, "digest": {"main": ls.digest(model)}}


def test_repeated_updates_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with pytest.raises(ConnectionError):
        build(tmp_path, CSVLogger(), 13, fail_at=11).run()
    marked = path.read_text().replace("\n10,", "\n10,-")
    assert "\n10,-" in marked
    path.write_text(marked)
    build(tmp_path, CSVLogger(), 13).run(resume="auto")
    assert path.read_text().startswith(marked)
    assert [update for update, _ in curves(path)["main/loss"]] == UPDATES["main/loss"]


def test_a_row_that_is_not_whole_is_written_again(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", CSVLogger())
    with pytest.raises(ConnectionError):
        build(tmp_path / "run", CSVLogger(), 13, fail_at=11).run()
    path = tmp_path / "run/metrics.csv"
    path.write_bytes(path.read_bytes()[:-4])
    build(tmp_path / "run", CSVLogger(), 13).run(resume="auto")
    assert path.read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()


def test_with_another_rate_the_entries_after_the_snapshot_are_replaced(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", CSVLogger())
    stopped_run(tmp_path / "stopped", CSVLogger, lr=0.01)
    found, first = curves(tmp_path / "stopped/metrics.csv"), curves(tmp_path / "whole/metrics.csv")
    assert [update for update, _ in found["main/loss"]] == UPDATES["main/loss"]
    assert [a == b for a, b in zip(found["main/loss"], first["main/loss"], strict=True)] == [True] * 4 + [False] * 3
    assert json.loads((tmp_path / "stopped/metrics.json").read_text())["recipe"]["optimizer.lr"] == 0.01


def test_a_new_run_starts_a_new_table(tmp_path: Path) -> None:
    for updates in (4, 2):
        Trainer(
            CountingUpdater(2, [1.0] * 4), (updates, "iteration"), tmp_path, extensions=[CSVLogger("a/b.csv")]
        ).run()
    assert curves(tmp_path / "a/b.csv") == {"epoch": [(2, 1.0)], "main/loss": [(2, 1.0)]}


def test_a_new_name_is_a_new_column(tmp_path: Path) -> None:
    logger = CSVLogger(keys=["main/loss", "x, y"], trigger=(1, "iteration"))
    trainer = Trainer(CountingUpdater(2, [1.0, math.nan, 3.0, 4.0]), (4, "iteration"), tmp_path, extensions=[logger])
    trainer.extend(lambda each: each.observe("x, y", 0.5), trigger=(2, "iteration"), priority=300)
    trainer.extend(lambda each: each.observe("other", 0.5), name="other", priority=300)
    trainer.run()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        'update,epoch,main/loss,"x, y"',
        "1,0.5,1.0,",
        "2,1.0,nan,0.5",
        "3,1.5,3.0,",
        "4,2.0,4.0,0.5",
    ]


def test_a_run_interrupted_between_two_entries_writes_none_twice(tmp_path: Path) -> None:
    updater = CountingUpdater(4, [1.0, 3.0] * 5, fail_at=5)
    logger = CSVLogger(trigger=(2, "iteration"))
    trainer = Trainer(updater, (8, "iteration"), tmp_path, extensions=[logger])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.run()
    assert curves(tmp_path / "metrics.csv")["main/loss"] == [(update, 2.0) for update in (2, 4, 6, 8)]


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(StateError, match="The state of CSVLogger must hold 'means', 'observed_at'"):
        CSVLogger().load_state_dict({})
