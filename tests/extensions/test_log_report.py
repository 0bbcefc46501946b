"""The log: weighted means, whole lines, and no line twice after a resume."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import SideFileWarning, StateError
from lockstep.extensions import LogReport
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
from tests.support import zygote
from tests.support.plain_updaters import CountingUpdater


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "elapsed_time"} for entry in entries]


def test_an_entry_holds_the_counters_and_the_mean_over_samples(tmp_path: Path) -> None:
    losses = [Mean(torch.tensor(30.0), 30), Mean(torch.tensor(10.0), 2), Mean(5.0, 4), 0.25]
    report = LogReport(trigger=(2, "iteration"))
    trainer = Trainer(CountingUpdater(4, losses), (1, "epoch"), tmp_path, extensions=[report])
    trainer.run()
    assert timeless(report.log) == [
        {"epoch": 0, "iteration": 2, "epoch_detail": 0.5, "main/loss": 40 / 32},
        {"epoch": 1, "iteration": 4, "epoch_detail": 1.0, "main/loss": 5.25 / 5},
    ]
    assert lines(tmp_path / "log.jsonl") == report.log
    assert 0 < report.log[0]["elapsed_time"] <= report.log[1]["elapsed_time"] <= trainer.elapsed_time


def test_values_observed_by_writers_and_only_the_keys_wanted(tmp_path: Path) -> None:
    report = LogReport(["val", "absent"], (4, "iteration"), "folder/val.jsonl")
    trainer = Trainer(CountingUpdater(4, [1.0] * 4), (4, "iteration"), tmp_path, extensions=[report])
    trainer.extend(lambda trainer: trainer.observe("val", 0.5), trigger=(2, "iteration"), priority=300)
    with pytest.warns(UserWarning, match="`keys` of LogReport must name observed values, got 'absent'"):
        trainer.run()
    assert timeless(report.log) == [{"epoch": 1, "iteration": 4, "epoch_detail": 1.0, "val": 0.5}]
    assert lines(tmp_path / "folder" / "val.jsonl") == report.log


def test_extend_may_change_the_interval(tmp_path: Path) -> None:
    report = LogReport()
    trainer = Trainer(CountingUpdater(4, [1.0, 2.0, 3.0, 4.0]), (1, "epoch"), tmp_path)
    trainer.extend(report, trigger=(2, "iteration"))
    trainer.run()
    assert [entry["main/loss"] for entry in report.log] == [1.5, 3.5]


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    losses = [math.nan, math.inf, -math.inf]
    report = LogReport(trigger=(1, "iteration"))
    Trainer(CountingUpdater(4, losses), (3, "iteration"), tmp_path, extensions=[report]).run()
    assert [entry["main/loss"] for entry in lines(tmp_path / "log.jsonl")] == ["nan", "inf", "-inf"]
    assert [str(entry["main/loss"]) for entry in report.log] == ["nan", "inf", "-inf"]


def test_a_fresh_run_warns_and_begins_a_fresh_log(tmp_path: Path) -> None:
    first, second = (Trainer(CountingUpdater(2), (each, "iteration"), tmp_path, [LogReport()]) for each in (4, 2))
    first.run()
    with pytest.warns(SideFileWarning, match=r"log\.jsonl is the log of another run, .* pass another `out`"):
        second.run()
    assert [entry["iteration"] for entry in lines(tmp_path / "log.jsonl")] == [2]
    second.until = (4, "iteration")  # type: ignore[assignment]
    second.run()
    assert [entry["iteration"] for entry in lines(tmp_path / "log.jsonl")] == [2, 4]


def build(out: Path, until: int, save_at: int = 0) -> tuple[Trainer, list[str]]:
    losses = [Mean(torch.tensor(0.1 * number), number) for number in range(1, 20)]
    trainer = Trainer(CountingUpdater(4, losses), (until, "iteration"), out)
    trainer.extend(LogReport(trigger=(3, "iteration")))
    states: list[str] = []

    def save(trainer: Trainer) -> None:
        if trainer.updater.iteration == save_at:
            states.append(json.dumps(trainer.state_dict()))

    for name, priority in (("early", 1000), ("late", -100)):
        trainer.extend(save, name=name, priority=priority)
    return trainer, states


@pytest.mark.parametrize("save_at", range(1, 10))
@pytest.mark.parametrize("which", [0, 1], ids=["saved before the log's turn", "saved after"])
def test_a_resumed_run_writes_the_file_of_an_undisturbed_one(tmp_path: Path, save_at: int, which: int) -> None:
    build(tmp_path / "whole", 12)[0].run()
    first, states = build(tmp_path / "run", 11, save_at)
    first.run()  # goes on behind the saved state, so that there are lines to drop
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"epoch": 2, "itera')  # and one half written
    resumed, _ = build(tmp_path / "run", 12)
    resumed.load_state_dict(json.loads(states[which]))
    resumed.run()
    found, expected = (timeless(lines(tmp_path / name / "log.jsonl")) for name in ("run", "whole"))
    assert found == expected
    log = resumed.get_extension("LogReport")
    assert isinstance(log, LogReport)
    assert timeless(log.log) == expected


def test_a_log_interrupted_between_two_lines_writes_none_twice(tmp_path: Path) -> None:
    updater = CountingUpdater(4, [1.0] * 9, fail_at=5)
    trainer = Trainer(updater, (8, "iteration"), tmp_path, extensions=[LogReport(trigger=(2, "iteration"))])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.run()
    assert [entry["iteration"] for entry in lines(tmp_path / "log.jsonl")] == [2, 4, 6, 8]


@pytest.mark.parametrize("state", [{}, {"entries": 0}, {"entries": 0, "last": {}, "averages": {}, "more": 1}])
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="The state of LogReport must hold 'entries', 'last', 'position', 'averages'"):
        LogReport().load_state_dict(state)


ENDLESS = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.support.plain_updaters import CountingUpdater
from lockstep.extensions import LogReport
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
updater = CountingUpdater(4, [Mean(1.0, 3)] * 100)
Trainer(updater, None, sys.argv[1], extensions=[LogReport(trigger=(1, "iteration"))]).run()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    arguments = [sys.executable, "-c", ENDLESS, str(tmp_path), str(Path(__file__).parents[2])]
    with zygote.Popen(arguments) as process:
        deadline = time.monotonic() + 120
        while (not path.exists() or path.stat().st_size < 50_000) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.read_bytes().endswith(b"}\n")
    entries = lines(path)
    assert [entry["iteration"] for entry in entries] == list(range(1, len(entries) + 1))
    assert len(entries) > 100


def test_its_own_state_needs_no_file(tmp_path: Path) -> None:
    report = LogReport(trigger=(1, "update"))
    trainer = Trainer(CountingUpdater(4, [1.0] * 4), (3, "update"), tmp_path, [report])
    trainer.run()
    before, entries = report.state_dict(), report.log
    (tmp_path / "log.jsonl").unlink()
    report.load_state_dict({**before, "entries": 2})
    report.load_state_dict(before)
    report.prepare(trainer)
    assert report.log == entries
