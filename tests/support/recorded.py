"""Runs that leave everything in their folder that a report shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.communicators import Communicator
from lockstep.extensions import LogReport, ObserveLR, RunRecord, Throughput
from lockstep.triggers import TriggerSpec
from tests.support.resuming import PatientSnapshot, vectors


def recorded_run(
    out: Path,
    *,
    updates: int = 6,
    lr: float = 0.25,
    devices: Any = ("cpu", "cpu"),
    trigger: TriggerSpec = (2, "update"),
    resume: bool = False,
    record: bool = True,
    communicator: Communicator | None = None,
    **options: Any,
) -> ls.Trainer:
    """Train a small classifier with a log, digests, snapshots and a record, and return its trainer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(vectors(), 8, shuffle=True, seed=3),
        torch.optim.SGD(model.parameters(), lr=lr),
        model,
        devices=list(devices),
        num_shards=4,
        loss_fn=ls.supervised(functional.cross_entropy),
        communicator=communicator,
        **options,
    )
    trainer = ls.Trainer(updater, (updates, "update"), out=out)
    trainer.extend(ObserveLR())
    trainer.extend(Throughput(trigger=(1, "update")))
    trainer.extend(LogReport(trigger=(1, "update")))
    if record:
        trainer.extend(RunRecord(trigger=trigger))
    trainer.extend(PatientSnapshot(keep=2, digest_every=1), trigger=(3, "update"))
    trainer.run(resume="auto" if resume else None)
    return trainer
