"""Quotients of sums, however the values are distributed over updates, and with a resume anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.extensions import LogReport, MicroAverage
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
from tests.support.plain_updaters import CountingUpdater

CORRECT = [3.0, 1.0, 4.0, 1.0, 5.0]
ALL = [4.0, 2.0, 8.0, 1.0, 6.0]


def build(out: Path, updates: int = 5) -> tuple[Trainer, LogReport]:
    losses = [Mean(number, 1) for number in CORRECT]
    trainer = Trainer(CountingUpdater(4, losses), (updates, "iteration"), out)
    trainer.extend(lambda each: each.observe("all", ALL[each.updater.iteration - 1]), name="all", priority=300)
    trainer.extend(MicroAverage("main/loss", "all", "accuracy", trigger=(2, "iteration")))
    log = LogReport(["accuracy"], trigger=(1, "iteration"))
    trainer.extend(log)
    return trainer, log


def values(log: LogReport) -> list[float]:
    return [entry["accuracy"] for entry in log.log if "accuracy" in entry]


def test_the_sum_of_one_divided_by_the_sum_of_the_other(tmp_path: Path) -> None:
    trainer, log = build(tmp_path)
    trainer.run()
    assert values(log) == [4 / 6, 5 / 9]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_observes_the_same(tmp_path: Path, stop: int) -> None:
    first, _ = build(tmp_path, stop)
    first.run()
    state = json.loads(json.dumps(first.state_dict()))
    resumed, log = build(tmp_path)
    resumed.load_state_dict(state)
    resumed.run()
    assert values(log) == [4 / 6, 5 / 9]


def test_without_values_nothing_is_observed(tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(4, [1.0] * 4), (4, "iteration"), tmp_path)
    trainer.extend(MicroAverage("main/loss", "absent", "accuracy", trigger=(2, "iteration")))
    trainer.run()
    assert "accuracy" not in trainer.observation
