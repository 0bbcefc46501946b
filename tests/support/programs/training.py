"""A whole run with extensions, as every process of it makes it."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import lockstep as ls
from lockstep import extensions as ex
from tests.support.programs.evaluating import Decaying
from tests.support.runs import cross_entropy, state_digest, updater_for
from tests.support.workloads import CONVNET


class Steps:
    """A dataset that counts how often it is asked."""

    def __init__(self) -> None:
        self.data = CONVNET.data(13)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.data[index]


def train(out: str) -> dict[str, Any]:
    """Train for three epochs; say all that was logged, printed, called and measured."""
    communicator = ls.find_communicator()
    updater = updater_for(CONVNET, num_shards=5)
    shared, whole = Steps(), Steps()
    folder = Path(out) / f"rank {communicator.rank} of {communicator.size}"
    trainer = ls.Trainer(updater, until=(3, "epoch"), out=folder)
    printed, bar = io.StringIO(), io.StringIO()
    trainer.extend(
        ex.Evaluator(
            ls.BatchIterator(shared, 3, repeat=False),
            metrics={"accuracy": ls.metrics.Accuracy()},
            loss_fn=cross_entropy,
        )
    )
    trainer.extend(ex.Evaluator(ls.BatchIterator(whole, 3, repeat=False), metrics={"odd": Decaying()}), name="odd")
    calls: dict[str, list[int]] = {"best": [], "time": []}

    def note(name: str) -> Any:
        return lambda trainer: calls[name].append(trainer.updater.iteration)

    trainer.extend(note("best"), name="best", trigger=ls.triggers.MinValue("validation/main/loss"))
    trainer.extend(note("time"), name="time", trigger=ls.triggers.Time(0.05))
    trainer.extend(lambda _: time.sleep(0.02 * (1 + communicator.rank)), name="dawdle")
    trainer.extend(ex.LogReport())
    trainer.extend(ex.PrintReport(["epoch", "main/loss", "validation/main/accuracy"], out=printed))
    trainer.extend(ex.PlotReport())
    trainer.extend(ex.ProgressBar(show=True, out=bar))
    trainer.run()
    log = trainer.get_extension("LogReport").log
    for entry in log:
        del entry["elapsed_time"]
    return {
        "log": log,
        "printed": printed.getvalue(),
        "bar": bool(bar.getvalue()),
        "files": sorted(path.name for path in folder.iterdir()),
        "calls": calls,
        "asked": (len(shared.asked), len(whole.asked)),
        "end": state_digest(updater),
    }


def fail_between_updates(out: str) -> list[str]:
    """Raise in an extension of one rank."""
    communicator = ls.find_communicator()
    trainer = ls.Trainer(updater_for(CONVNET, num_shards=5), until=(3, "epoch"), out=out)

    def fail(_: Any) -> None:
        if communicator.rank == 1:
            raise RuntimeError("the disk is full")

    trainer.extend(fail, name="fail", trigger=(2, "iteration"))
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.run()
    return []
