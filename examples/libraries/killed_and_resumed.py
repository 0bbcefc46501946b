"""Kill a run with SIGKILL in the middle, resume it, and compare with a run that was left alone.

    python examples/libraries/killed_and_resumed.py            resumed on one CPU device
    python examples/libraries/killed_and_resumed.py cpu cpu    resumed on two: the same digest

Needs no other library. The killed process gets no chance to do anything: what it had written before is all there is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

OUT = "runs/killed"
UPDATES = 24
KILLED_AFTER = 15


def make_trainer(devices: list[str], out: str) -> tuple[ls.Trainer, nn.Module]:
    """Create a trainer that writes a snapshot every four updates."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 2))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), 32, shuffle=True, seed=0),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        model,
        devices=devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        seed=0,
    )
    trainer = ls.Trainer(updater, until=(UPDATES, "iteration"), out=out)
    trainer.extend(ls.extensions.Snapshot(), trigger=(4, "iteration"))
    return trainer, model


def kill_self(trainer: ls.Trainer) -> None:
    """End this process as the kernel does when memory runs out."""
    if trainer.updater.iteration == KILLED_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)


def main(devices: list[str]) -> None:
    """Let another process be killed, go on where it was, and compare."""
    for folder in (OUT, f"{OUT}-alone"):
        shutil.rmtree(folder, ignore_errors=True)
    killed = subprocess.run([sys.executable, __file__, "--be-killed"], check=False)  # noqa: S603 - this file
    print(f"killed by signal {-killed.returncode}; snapshots of updates", end=" ")
    print(*(found.update for found in ls.snapshots.list(OUT)))
    trainer, resumed = make_trainer(devices, OUT)
    trainer.run(resume="auto")
    trainer, alone = make_trainer(["cpu"], f"{OUT}-alone")
    trainer.run()
    if ls.digest(resumed) != ls.digest(alone):
        sys.exit("The resumed run has other weights.")
    print(ls.digest(resumed))


if __name__ == "__main__":
    if sys.argv[1:] == ["--be-killed"]:
        doomed, _ = make_trainer(["cpu"], OUT)
        doomed.extend(kill_self, trigger=(1, "iteration"))
        doomed.run()
    else:
        main(sys.argv[1:] or ["cpu"])
