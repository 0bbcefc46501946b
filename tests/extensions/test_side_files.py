"""The files of runs beside their snapshots: complete after failures of the disk, untouched by a start that is refused.

They are read before training, which names what is damaged or no regular file.
"""

from __future__ import annotations

import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.errors import OrderError, SideFileError, SideFileWarning, SnapshotError, SnapshotWarning
from lockstep.extensions import CSVLogger, LogReport, RunRecord
from lockstep.side_files import SideFile
from lockstep.trainer import Trainer
from tests.support.plain_updaters import CountingUpdater
from tests.support.side_files import (
    KINDS,
    LINES,
    NAMES,
    UPDATES,
    build,
    contents,
    full_disk,
    mutated,
    plant,
    stopped,
    timeless,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was left alone, and one that was stopped after a snapshot."""
    out = tmp_path_factory.mktemp("runs")
    build(out / "whole").run()
    stopped(out / "stopped")
    return {path.name: path for path in out.iterdir()}


@pytest.fixture
def out(tmp_path: Path, folders: dict[str, Path]) -> Path:
    """A copy of the run that was stopped."""
    return shutil.copytree(folders["stopped"], tmp_path / "run")


def test_a_resumed_run_has_the_files_of_one_that_was_left_alone(out: Path, folders: dict[str, Path]) -> None:
    build(out).run(resume="auto")
    assert timeless(out) == timeless(folders["whole"])


def test_a_fresh_start_that_snapshots_refuse_changes_nothing(out: Path) -> None:
    before = contents(out)
    with pytest.raises(OrderError, match="of a run that this one does not continue"):
        build(out).run()
    assert contents(out) == before


def test_a_second_run_leaves_the_files_of_a_live_one(tmp_path: Path) -> None:
    seen: list[dict[str, bytes]] = []

    def start_again() -> None:
        seen.append(contents(tmp_path))
        for resume in (None, "auto"):
            with pytest.raises((SnapshotError, OrderError), match=r"is in use by|does not continue"):
                build(tmp_path).run(resume=resume)
            seen.append(contents(tmp_path))

    build(tmp_path, at={6: start_again}).run()
    assert seen[0] == seen[1] == seen[2]
    assert all(seen[0].values())


@pytest.mark.filterwarnings("ignore:.*is the log of another run:lockstep.errors.SideFileWarning")
@pytest.mark.parametrize("hook", ["initialize", "update"])
def test_a_start_that_fails_leaves_the_files_of_an_earlier_run(tmp_path: Path, hook: str) -> None:
    extensions = [LogReport(trigger=(1, "update")), CSVLogger(trigger=(1, "update")), RunRecord()]
    Trainer(CountingUpdater(2, [1.0] * 4), (4, "update"), tmp_path, extensions).run()
    names = ["log.jsonl", "metrics.csv", "run.jsonl"]
    before = [(tmp_path / name).read_bytes() for name in names]

    def refuse(_: Trainer) -> None:
        raise ConnectionError("refused")

    updater = CountingUpdater(2, [1.0] * 4, fail_at=0 if hook == "update" else None, error=ConnectionError("refused"))
    trainer = Trainer(updater, (4, "update"), tmp_path, [LogReport(), CSVLogger(), RunRecord()])
    if hook == "initialize":
        trainer.extend(ls.extensions.make_extension(initialize=refuse)(print))
    with pytest.raises(ConnectionError):
        trainer.run()
    assert [(tmp_path / name).read_bytes() for name in names] == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NAMES, *(f"{name}.new" for name in NAMES)])
def test_what_is_no_regular_file_is_refused_before_training(out: Path, tmp_path: Path, name: str, kind: str) -> None:
    target = tmp_path / "outside"
    target.write_text("precious")
    plant(out / name, kind, target)
    trainer = build(out)
    with pytest.raises(SideFileError, match=f"{name} must be a regular file, got {kind}"):
        trainer.run(resume="auto")
    assert trainer.updater.iteration == 4
    assert target.read_text() == "precious"


def test_after_a_full_disk_every_file_is_complete(tmp_path: Path, folders: dict[str, Path]) -> None:
    stack = ExitStack()
    trainer = build(tmp_path, at={3: lambda: stack.enter_context(full_disk(20)), 6: stack.close})
    with stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    assert {each.category for each in caught} == {SnapshotWarning, SideFileWarning}
    told = {name for name in NAMES for each in caught if name in str(each.message)}
    assert told == set(LINES)
    assert timeless(tmp_path) == timeless(folders["whole"])
    ls.snapshots.verify(tmp_path / "snapshots/00000008")


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_gone_comes_back_with_its_files(tmp_path: Path, folders: dict[str, Path], moved: bool) -> None:
    out = tmp_path / "run"

    def remove() -> None:
        out.rename(tmp_path / "moved") if moved else shutil.rmtree(out)

    with pytest.warns(SnapshotWarning):
        build(out, at={3: remove}).run()
    expected = timeless(folders["whole"])
    del expected["json"]
    (out / "metrics.json").touch()
    assert {name: value for name, value in timeless(out).items() if name in expected} == expected


@pytest.mark.parametrize(("make", "lines"), [(LogReport, 3), (CSVLogger, 1 + 3), (RunRecord, 4)])
def test_what_is_required_ends_the_run(tmp_path: Path, make: Any, lines: int) -> None:
    extension = make(trigger=(1, "update"), required=True)
    updater = build(tmp_path / "other").updater
    trainer = Trainer(updater, (3, "update"), tmp_path, extensions=[extension])
    with full_disk(3), pytest.raises(SideFileError, match=r"could not be written: .*File too large.*required=True"):
        trainer.run()
    trainer.run()
    name = {LogReport: "log.jsonl", CSVLogger: "metrics.csv", RunRecord: "run.jsonl"}[make]
    # The record has a session, two intervals and an end: the first session could not be written.
    assert len((tmp_path / name).read_text().splitlines()) == lines


def check_damage(out: Path, whole: dict[str, bytes], name: str, seed: int) -> None:
    """Resume a run with a damaged file: it ends, or an error names the file before training."""
    for each, content in whole.items():
        (out / each).write_bytes(content)
    (out / name).write_bytes(mutated(whole[name], seed))
    trainer, message = build(out, updates=5), ""
    try:
        trainer.run(resume="auto")
    except SideFileError as error:
        message = str(error)
    assert trainer.updater.iteration == (4 if message else 5)
    if message:
        assert str(out / name) in message
        assert "or move it to another folder" in message


def fuzz(out: Path, seeds: range, name: str) -> None:
    whole = contents(out)
    snapshots = shutil.copytree(out / "snapshots", out.with_name("kept"))
    for seed in seeds:
        shutil.rmtree(out / "snapshots")
        shutil.copytree(snapshots, out / "snapshots")
        check_damage(out, whole, name, seed)


@pytest.mark.filterwarnings("ignore::lockstep.SideFileWarning", "ignore::lockstep.DeterminismWarning")
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_named_before_training(out: Path, name: str) -> None:
    fuzz(out, range(5), name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lockstep.SideFileWarning", "ignore::lockstep.DeterminismWarning")
@pytest.mark.parametrize("name", NAMES)
def test_each_of_500_damages_is_named_before_training(out: Path, name: str) -> None:
    fuzz(out, range(500), name)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.json", b"{"),
        ("metrics.csv", b"update,epoch\n1,x\n"),
        ("digests.jsonl", b'{"update": 1e999, "digest": "x", "tensors": ""}\n'),
        ("digests.jsonl", b"[" * 100_000 + b"\n"),
        ("log.jsonl", b'{"iteration": 1e999}\n'),
        ("log.jsonl", b'{"iteration": 1, "main/loss": [1]}\n'),
        ("log.jsonl", b"[" * 100_000 + b"\n"),
    ],
)
def test_the_cure_of_damage_works(out: Path, folders: dict[str, Path], name: str, damage: bytes) -> None:
    (out / name).write_bytes(damage)
    with pytest.raises(SideFileError, match=rf"{name} must be as lockstep has written it, but .* is damaged"):
        build(out).run(resume="auto")
    (out / name).rename(out.with_name("aside"))
    with ExitStack() as stack:
        if name in {"log.jsonl", "metrics.csv"}:
            stack.enter_context(pytest.warns(SideFileWarning, match="it is absent|up to update 4, but it ends at 0"))
        build(out).run(resume="auto")
    assert ls.snapshots.compare_runs(out, folders["whole"]).first is None


def test_the_size_of_a_log_changes_no_snapshot(tmp_path: Path) -> None:
    sizes = []
    for every in (1, UPDATES):
        report = LogReport(trigger=(every, "update"))
        trainer = Trainer(CountingUpdater(4, [1.0] * UPDATES), (UPDATES, "update"), tmp_path / f"{every}", [report])
        trainer.run()
        sizes.append(sorted(report.state_dict()))
        assert report.num_entries == UPDATES // every
    assert sizes[0] == sizes[1] == ["averages", "entries", "last", "position"]


def logged(out: Path) -> list[int]:
    found: list[int] = []
    ls.side_files.SideFile(out, "log.jsonl").read_lines(lambda entry: found.append(entry["iteration"]))
    return found


def test_a_resume_in_another_folder_copies_the_log_up_to_the_snapshot(
    out: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    before = contents(out)
    trainer = build(tmp_path / "other")
    trainer.run(resume=out)
    assert timeless(tmp_path / "other")["log"] == timeless(folders["whole"])["log"]
    assert contents(out) == before
    again = build(tmp_path / "other")
    again.run(resume="auto")
    report = again.get_extension("LogReport")
    assert isinstance(report, LogReport)
    assert [entry["iteration"] for entry in report.log] == list(range(1, UPDATES + 1))


def test_a_resume_without_the_log_says_so(out: Path, tmp_path: Path) -> None:
    (out / "log.jsonl").unlink()
    with pytest.warns(SideFileWarning, match=r"log\.jsonl must have the 4 entries .*, but it is absent"):
        build(tmp_path / "other").run(resume=out)
    assert logged(tmp_path / "other") == [4, 5, 6, 7, 8]


def test_a_log_that_is_too_short_is_named(out: Path) -> None:
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(lines[:2]))
    with pytest.warns(SideFileWarning, match=r"must have the 4 entries of the log .*, but it has 3 of them"):
        build(out).run(resume="auto")
    assert logged(out) == [1, 2, 4, 5, 6, 7, 8]


def test_a_state_of_an_earlier_version_still_loads(tmp_path: Path) -> None:
    entries = [{"epoch": 0, "iteration": 1, "epoch_detail": 0.25, "elapsed_time": 0.5, "main/loss": 1.0}]
    trainer = Trainer(CountingUpdater(4, [1.0] * 4), (2, "update"), tmp_path, [LogReport(trigger=(1, "update"))])
    state: Any = trainer.state_dict()
    state["updater"] = {"num_done": 1}
    state["extensions"]["LogReport"] = {"log": entries, "averages": {}}
    trainer.load_state_dict(state)
    trainer.run()
    assert logged(tmp_path) == [1, 2]
    assert [entry["iteration"] for entry in trainer.get_extension("LogReport").log] == [1, 2]  # type: ignore[attr-defined]


def test_a_log_of_many_entries_is_no_part_of_a_snapshot(tmp_path: Path) -> None:
    report = LogReport(trigger=(1, "update"), filename="many.jsonl")
    trainer = build(tmp_path, 4)
    values = [f"value {index}" for index in range(1000)]

    def observe(trainer: Trainer) -> None:
        for name in values:
            trainer.observe(name, 0.5)

    trainer.extend(observe, priority=1000)
    trainer.extend(report, name="many")
    # More values than a manifest may have.
    entry = {"epoch": 0, "iteration": 0, "epoch_detail": 0.0, "elapsed_time": 0.0, **dict.fromkeys(values, 0.5)}
    report.load_state_dict({"log": [entry] * 1100, "averages": {}})
    trainer.run()
    manifest = (tmp_path / "snapshots/00000004/snapshot.json").read_bytes()
    assert manifest.count(b"value 999") < 5


def test_a_resume_parses_no_line_of_a_log_that_is_as_it_was(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a line was parsed")

    monkeypatch.setattr(SideFile, "read_lines", refuse)
    report = LogReport(trigger=(1, "update"))
    trainer = Trainer(build(out).updater, (UPDATES, "update"), out, [report])
    with pytest.warns(UserWarning, match="were removed"):
        trainer.run(resume="auto")
    assert report.num_entries == UPDATES
    assert [entry["iteration"] for entry in report.log] == list(range(1, UPDATES + 1))


@pytest.mark.parametrize("without", [["position"], []])
def test_a_log_that_has_changed_is_parsed(out: Path, folders: dict[str, Path], without: list[str]) -> None:
    # As the state of another rank, whose clock differs, or of an earlier version.
    lines = (out / "log.jsonl").read_text().replace('"elapsed_time": ', '"elapsed_time": 1')
    (out / "log.jsonl").write_text(lines)
    trainer = build(out)
    load = LogReport.load_state_dict

    def load_earlier(report: LogReport, state: dict[str, Any]) -> None:
        load(report, {name: value for name, value in state.items() if name not in without})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogReport, "load_state_dict", load_earlier)
        trainer.run(resume="auto")
    assert timeless(out)["log"] == timeless(folders["whole"])["log"]
