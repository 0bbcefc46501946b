"""Trials of a program, and what is said at the end of a run."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep import extensions
from lockstep.triggers import EarlyStopping, Interval
from tests.support.mistakes import DATA, batches, build


def evaluator(**options: Any) -> extensions.Evaluator:
    return extensions.Evaluator(batches(repeat=False, batch_size=2), {"accuracy": ls.metrics.Accuracy()}, **options)


class Counted(ls.Extension):
    trigger = (7, "epoch")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, trainer: ls.Trainer) -> None:
        self.calls.append(trainer.updater.iteration)


@pytest.mark.parametrize(("asked", "updates"), [(True, 1), (3, 3)])
def test_a_trial_calls_everything_once_and_leaves_nothing(asked: bool | int, updates: int, tmp_path: Path) -> None:
    trainer = ls.Trainer(build(), (100, "epoch"), tmp_path, fast_dev_run=asked)
    counted, log, test = Counted(), extensions.LogReport(), evaluator()
    for each in (counted, log, test, extensions.Snapshot()):
        trainer.extend(each)
    trainer.extend(Counted(), name="other", trigger=(1, "iteration"))
    trainer.run(resume="auto")
    assert (trainer.updater.iteration, counted.calls, len(log.log)) == (updates, [updates], 1)
    assert "validation/main/accuracy" in log.log[0]
    out = trainer.out
    assert sorted(path.name for path in out.iterdir()) == ["digests.jsonl", "log.jsonl", "snapshots"]
    assert list(tmp_path.iterdir()) == []
    del trainer, counted, log, test
    gc.collect()
    assert not out.exists()


def test_a_usual_run_is_no_trial(tmp_path: Path) -> None:
    trainer = ls.Trainer(build(), (1, "epoch"), tmp_path, fast_dev_run=False)
    trainer.run()
    assert (trainer.fast_dev_run, trainer.updater.iteration, trainer.out) == (0, 2, tmp_path)


@pytest.mark.parametrize(("limit", "trial", "seen"), [(None, 0, 6), (2, 0, 2), (4, 1, 1), (None, 3, 3)])
def test_an_evaluation_of_some_batches(limit: int | None, trial: int, seen: int, tmp_path: Path) -> None:
    sizes: list[int] = []

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        sizes.append(len(y))
        return ls.supervised(lambda output, _: output.sum())(model, x, y)

    trainer = ls.Trainer(build(), (1, "epoch"), tmp_path, fast_dev_run=trial)
    trainer.extend(evaluator(num_batches=limit, loss_fn=loss_fn, num_shards=1))
    trainer.run()
    assert sizes == [2] * seen


def test_a_pass_before_training_is_logged(tmp_path: Path) -> None:
    trainer = ls.Trainer(build(), (1, "epoch"), tmp_path)
    log = extensions.LogReport()
    trainer.extend(evaluator(), call_before_training=True)
    trainer.extend(log, call_before_training=True)
    trainer.run()
    assert [(entry["iteration"], "validation/main/accuracy" in entry) for entry in log.log] == [(0, True), (2, True)]


def test_an_early_stop_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until = EarlyStopping("main/loss", stop_at=1e9, max_trigger=(9, "epoch"))
    ls.Trainer(build(), until, tmp_path).run()
    assert capsys.readouterr().err == (
        "lockstep: Stopped after update 2 by EarlyStopping('main/loss', patience=3, mode='min'), before (9, 'epoch').\n"
    )


def test_a_run_that_reaches_its_end_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ls.Trainer(build(), (1, "epoch"), tmp_path / "a").run()
    ls.Trainer(build(), EarlyStopping(max_trigger=(1, "epoch")), tmp_path / "b").run()
    assert capsys.readouterr().err == ""


def press(trainer: ls.Trainer) -> None:
    if trainer.updater.iteration == 3:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_says_how_the_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = ls.Trainer(build(), (9, "epoch"), tmp_path)
    trainer.extend(press)
    trainer.extend(extensions.Snapshot())
    with pytest.raises(ls.SignalExit):
        trainer.run()
    said = capsys.readouterr().err
    assert said.startswith("lockstep: Stopped after update 3 by SIGINT. Its snapshot is written; the same command")
    assert (tmp_path / "snapshots" / "00000003").is_dir()


def test_ctrl_c_without_snapshots_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(trainer: ls.Trainer) -> None:
        if trainer.updater.iteration == 3:
            raise KeyboardInterrupt

    trainer = ls.Trainer(build(), (2, "epoch"), tmp_path)
    trainer.extend(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert "Stopped after update 3. No snapshot is written" in capsys.readouterr().err


def test_limits_of_triggers() -> None:
    either = EarlyStopping(max_trigger=(9, "epoch")) | Interval(5, "iteration")
    assert [ls.Trainer(build(), until).until.limit for until in ((2, "epoch"), either, lambda _: False, None)] == [
        (2, "epoch"),
        (9, "epoch"),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("size", "options", "length"),
    [(6, {}, 2), (5, {}, 3), (5, {"last_batch": "drop"}, 2), (5, {"last_batch": "wrap"}, 3), (12, {}, 1)],
)
def test_the_length_of_an_epoch(size: int, options: dict[str, Any], length: int) -> None:
    iterator = ls.BatchIterator(DATA, size, **options)
    assert len(iterator) == length
    assert len(list(ls.BatchIterator(DATA, size, repeat=False, **options))) == length


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 4), (2, 2), (3, 2), ({0: 4}, 1)])
def test_updates_per_epoch(accumulate: Any, updates: int) -> None:
    updater = build(iterator=batches(batch_size=3), accumulate=accumulate)
    assert updater.updates_per_epoch == updates
    assert "2 shards per batch on cpu" in repr(updater)


def test_a_source_without_a_length_has_no_updates_per_epoch() -> None:
    updater = build(iterator=lambda: iter([]))
    with pytest.raises(TypeError, match="`iterator` must have a length, got a IterableBatches"):
        _ = updater.updates_per_epoch
