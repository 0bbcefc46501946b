"""Train until killed; `python killed.py OUT DEVICES UPDATES SOURCE [KILL_AT]` continues from the newest snapshot.

After KILL_AT updates the last rank kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.data import Parts, Safetensors
from tests.support.resuming import images


def batches_of(source: str, folder: Path) -> Any:
    """Return batches of images: ours, of memory or of files, or those of a loader that saves its own position."""
    if source == "iterator":
        return ls.BatchIterator(images(), 12, shuffle=True, seed=3, last_batch="drop")
    kind, _, workers = source.partition(":")
    if kind == "parts":
        paths = [folder / f"{part}.safetensors" for part in range(2)]
        for part, path in enumerate(paths):
            if not path.exists():
                inputs, labels = (tensor[part * 20 : 20 + part * 30].clone() for tensor in images().tensors)
                save_file({"inputs": inputs, "labels": labels}, path)
        parts = Parts([Safetensors(path, block=3) for path in paths], num_sections=4, transform=as_tuple)
        return ls.BatchIterator(parts, 12, shuffle=True, seed=3, last_batch="drop", num_workers=int(workers or 2))
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - only this source needs it

    return StatefulDataLoader(images(), 12, shuffle=True, drop_last=True, num_workers=2)


def as_tuple(sample: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return sample["inputs"], sample["labels"]


def kill_last_rank(trainer: ls.Trainer) -> None:
    communicator = trainer.updater.communicator
    if communicator.rank == communicator.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main(out: str, devices: int, updates: int, source: str, kill_at: int = 0) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = ls.supervised(functional.cross_entropy)
    places = ["cpu"] * devices
    updater = ls.ParallelUpdater(
        batches_of(source, Path(out).parent), optimizer, model, devices=places, num_shards=4, loss_fn=loss
    )
    trainer = ls.Trainer(updater, (updates, "update"), out=out)
    trainer.extend(ls.extensions.LogReport(trigger=(10, "update")))
    # Within an epoch of 4 batches, so that a position in it must be saved.
    trainer.extend(ls.extensions.Snapshot(keep=10_000), trigger=(10, "update"))
    if kill_at:
        trainer.extend(kill_last_rank, trigger=ls.triggers.ManualSchedule([kill_at], "update"))
    trainer.run(resume="auto")
    start = 0 if trainer.resumption is None else trainer.resumption.update
    sys.stdout.write(f"{start} {ls.digest(model)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
