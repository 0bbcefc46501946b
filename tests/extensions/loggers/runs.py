"""A small run with a logger, an evaluation and snapshots, that can be stopped and resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.extensions import Logger
from lockstep.trainer import WRITER
from tests.support.resuming import PatientSnapshot, vectors

Curves = dict[str, list[tuple[int, float]]]
"""The points (update, value) of each name, in the order of the files."""

CONFIG = {"width": 8, "note": "a b", "rate": 0.1, "deep": True, "shape": (1, 2)}


def evaluate(trainer: ls.Trainer) -> None:
    trainer.observe("validation/score", trainer.updater.iteration / 8)


def build(out: Path, logger: Logger, updates: int, *, lr: float = 0.1, fail_at: int | None = None) -> ls.Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3)
    loss = ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=4, loss_fn=loss)
    trainer = ls.Trainer(updater, (updates, "iteration"), out=out)
    trainer.extend(evaluate, trigger=(5, "iteration"), priority=WRITER)
    trainer.extend(logger, trigger=(2, "iteration"))
    trainer.extend(PatientSnapshot(keep=100), trigger=(4, "iteration"))

    def fail(trainer: ls.Trainer) -> None:
        if trainer.updater.iteration == fail_at:
            raise ConnectionError("stopped")

    trainer.extend(fail, priority=-2_000_000)
    return trainer


def whole_run(out: Path, logger: Logger) -> ls.Trainer:
    trainer = build(out, logger, 13)
    trainer.run()
    return trainer


def stopped_run(out: Path, make: Callable[[], Logger], **changes: Any) -> ls.Trainer:
    """Stop a run after update 11, and resume it from the snapshot of update 8."""
    with contextlib.suppress(ConnectionError):
        build(out, make(), 13, fail_at=11).run()
    trainer = build(out, make(), 13, **changes)
    accept = ("optimizer.lr",) if changes else ()
    trainer.run(resume="auto", accept=accept)
    assert trainer.resumption is not None
    assert trainer.resumption.update == 8
    return trainer


UPDATES = {"main/loss": [2, 4, 6, 8, 10, 12, 13], "validation/score": [5, 10]}
"""The updates of each curve of a run of 13 updates."""


def check_curves(found: Curves, expected: Curves) -> None:
    assert found == expected
    assert {name: [update for update, _ in found[name]] for name in UPDATES} == UPDATES
