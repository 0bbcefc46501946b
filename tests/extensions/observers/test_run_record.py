"""`RunRecord` writes what a run is made of, where it ran, and where its time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.communicators import Communicator, kernel_class
from lockstep.extensions import RunRecord
from lockstep.program import describe_program
from tests.support.plain_updaters import CountingUpdater
from tests.support.ranks import run_on_ranks
from tests.support.recorded import recorded_run

PHASES = ["data", "compute", "reduce", "optimizer", "between updates"]


def lines(out: Path) -> list[tuple[str, dict[str, Any]]]:
    found = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    return [next(iter(each.items())) for each in found]


def kinds(out: Path) -> list[tuple[str, int]]:
    return [(kind, values["update"]) for kind, values in lines(out)]


def test_a_session_its_intervals_and_its_end(tmp_path: Path) -> None:
    trainer = recorded_run(tmp_path, updates=5)
    expected = [("session", 0), ("interval", 2), ("interval", 4), ("interval", 5), ("end", 5)]
    assert kinds(tmp_path) == expected
    (_, session), *intervals, (_, end) = lines(tmp_path)
    assert session["recipe"] == trainer.updater.recipe_fields()
    assert session["program"] == describe_program()
    assert session["kernel_class"] == kernel_class(trainer.updater.devices)
    assert [rank["devices"] for rank in session["ranks"]] == [["cpu", "cpu"]]
    assert [each["measured"] for _, each in intervals] == [2, 2, 1]
    assert [each["applied"] for _, each in intervals] == [2, 4, 5]
    assert end["digests"] == {"main": ls.digest(trainer.updater.get_all_models()["main"])}


def test_phases_add_up_and_devices_compute_in_theirs(tmp_path: Path) -> None:
    trainer = recorded_run(tmp_path, updates=4)
    total = 0.0
    for kind, values in lines(tmp_path):
        if kind == "interval":
            (rank,) = values["ranks"]
            assert list(rank["seconds"]) == PHASES
            assert all(seconds > 0 for seconds in rank["seconds"].values())
            assert len(rank["devices"]) == 2
            for device in rank["devices"]:
                assert device["forward"] > 0
                assert device["backward"] > 0
                assert sum(device.values()) <= rank["seconds"]["compute"]
            total += sum(rank["seconds"].values())
    # They are parts of the run's time without overlap.
    assert 0 < total <= trainer.elapsed_time


def test_one_of_several_updates_is_measured(tmp_path: Path) -> None:
    trainer = recorded_run(tmp_path / "a", updates=1)
    trainer = ls.Trainer(trainer.updater, (8, "update"), tmp_path, [RunRecord(trigger=(7, "update"), every=3)])
    trainer.run()
    # Updates 2, 4 and 7: the first one of the session, and those after multiples of 3.
    assert [values["measured"] for kind, values in lines(tmp_path) if kind == "interval"] == [3]


def test_retries_and_the_loss_scale(tmp_path: Path) -> None:
    recorded_run(tmp_path, updates=2, precision="fp16", loss_scale=ls.DynamicLossScale(2.0**24), trigger=(1, "update"))
    intervals = [values for kind, values in lines(tmp_path) if kind == "interval"]
    assert intervals[0]["retries"] > 0
    assert intervals[0]["loss_scale"] == 2.0 ** (24 - intervals[0]["retries"])
    assert (intervals[1]["retries"], intervals[1]["loss_scale"]) == (0, intervals[0]["loss_scale"])


def test_it_changes_no_bit(tmp_path: Path) -> None:
    trainers = [recorded_run(tmp_path / str(record), record=record) for record in (True, False)]
    assert [(each.out / "run.jsonl").exists() for each in trainers] == [True, False]
    assert len({ls.digest(each.updater.get_all_models()["main"]) for each in trainers}) == 1


def test_a_resumed_run_continues_the_file_and_a_new_one_starts_it_anew(tmp_path: Path) -> None:
    recorded_run(tmp_path, updates=3)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"interval": {"upd')
    recorded_run(tmp_path, updates=5, resume=True, devices=["cpu"])
    assert kinds(tmp_path) == [
        *(("session", 0), ("interval", 2), ("interval", 3), ("end", 3)),
        *(("session", 3), ("interval", 4), ("interval", 5), ("end", 5)),
    ]
    assert lines(tmp_path)[4][1]["resumed_from"] == str(tmp_path / "snapshots" / "00000003")
    trainer = ls.Trainer(CountingUpdater(), (1, "update"), tmp_path, [RunRecord()])
    trainer.run()
    assert kinds(tmp_path) == [("session", 0), ("end", 1)]


def test_a_run_that_goes_on_in_its_process_continues_the_file_that_it_began_in_a_new_folder(tmp_path: Path) -> None:
    recorded_run(tmp_path / "one", updates=3)
    trainer = recorded_run(tmp_path / "other", updates=0)
    for until in (4, 5):
        trainer.until = (until, "update")  # type: ignore[assignment]
        trainer.run(resume=tmp_path / "one" if until == 4 else None)
    assert kinds(tmp_path / "other") == [
        *(("session", 3), ("interval", 4), ("end", 4)),
        *(("session", 4), ("interval", 5), ("end", 5)),
    ]


def test_an_error_is_recorded(tmp_path: Path) -> None:
    def fail(_: ls.Trainer) -> None:
        raise ArithmeticError("x" * 1000)

    trainer = ls.Trainer(CountingUpdater(), (2, "update"), tmp_path, [RunRecord(), fail])
    with pytest.raises(ArithmeticError):
        trainer.run()
    kind, end = lines(tmp_path)[-1]
    assert (kind, end["update"], "digests" in end) == ("end", 1, False)
    assert end["error"] == f"ArithmeticError: {'x' * 1000}"[:500]


def on_rank(communicator: Communicator, out: str) -> None:
    recorded_run(Path(out), updates=4, devices=["cpu"] * (1 + communicator.rank), communicator=communicator)


def test_all_ranks_are_in_the_file_of_rank_0(tmp_path: Path) -> None:
    run_on_ranks(on_rank, 2, str(tmp_path))
    (_, session), (_, interval), *_ = lines(tmp_path)
    assert [rank["devices"] for rank in session["ranks"]] == [["cpu"], ["cpu", "cpu"]]
    assert [len(rank["devices"]) for rank in interval["ranks"]] == [1, 2]
    for rank in interval["ranks"]:
        assert all(rank["seconds"][phase] > 0 for phase in ("compute", "reduce"))


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (1.5, TypeError)])
def test_every_must_be_a_positive_integer(every: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`every` must"):
        RunRecord(every=every)
