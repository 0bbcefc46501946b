"""A small run that tests signal or kill at named points: ``signalled.py OUT UPDATES [POINT:UPDATE]...``.

At a point the program writes the point and its process to stderr, and waits for what the test does to it. A point of
one rank is written ``rank1.loss:5``, one that does not depend on the update ``writing:*``, and one of the processes
that a launcher has started again ``restart1.rank1.loss:5``. A signal ends the wait, unless the variable HOLD is set.
At ``moment`` the program does not wait, so that the test kills it some time later.

A weight of the model counts how often each sample was used: it is the number of epochs for each of them at the end of
an epoch. Every rank also notes each finished update with the clock in the file ``progress``. ``{rank}`` in OUT stands
for the rank, for machines that do not share a folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.snapshots import resuming, writer
from lockstep.stopping import STOP
from lockstep.trainer import READER
from tests.support.resuming import Noted, vectors

RANK = int(os.environ.get("RANK", "0"))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
HOLD = bool(os.environ.get("HOLD"))
SLOW = float(os.environ.get("SLOW", "0"))
"""Seconds that the disk takes for each file of a snapshot."""
SECONDS = 90.0
"""How long a point waits; longer than what comes takes."""
NUM_SAMPLES, BATCH = 48, 8
UPDATES_OF_AN_EPOCH = NUM_SAMPLES // BATCH


class Points:
    """The points at which this process waits."""

    def __init__(self, names: list[str]) -> None:
        self.left = set(names)
        self.updater: ls.ParallelUpdater | None = None

    def reach(self, name: str, *, until_raised: bool = False) -> None:
        update: object = "*" if self.updater is None else self.updater.iteration
        prefixes = [f"restart{RESTARTS}.rank{RANK}."] if RESTARTS else ["", f"rank{RANK}."]
        for point in {f"{name}:{update}", f"{name}:*"}:
            for each in (prefix + point for prefix in prefixes):
                if each in self.left:
                    self.left.remove(each)
                    sys.stderr.write(f"at {each} {os.getpid()}\n")
                    sys.stderr.flush()
                    if name != "moment":
                        self._wait(until_raised=until_raised)

    def _wait(self, *, until_raised: bool) -> None:
        deadline = time.monotonic() + SECONDS
        while (until_raised or HOLD or not STOP.received) and time.monotonic() < deadline:
            time.sleep(0.01)


class Data(torch.utils.data.Dataset[Any]):
    """Samples with their indices."""

    def __init__(self, points: Points) -> None:
        self.points, self.samples = points, vectors(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.points.reach("moment")
        self.points.reach("sample")
        return *self.samples[index], index


class Batches:
    """The batches of a source that may be waited for."""

    def __init__(self, points: Points) -> None:
        self.points, self.samples = points, Data(points)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, NUM_SAMPLES, BATCH):
            self.points.reach("batch", until_raised=True)
            chosen = [self.samples[index] for index in range(start, start + BATCH)]
            yield tuple(torch.stack([torch.as_tensor(each) for each in column]) for column in zip(*chosen, strict=True))

    def __len__(self) -> int:
        return UPDATES_OF_AN_EPOCH


class Counting(nn.Module):
    """A small model, and a weight that each use of a sample lowers by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.uses = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(inputs)
        return out


class Reach(ls.Extension):
    """A point between the other extensions."""

    def __init__(self, points: Points, name: str) -> None:
        self.points, self._name = points, name

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, trainer: ls.Trainer) -> None:  # noqa: ARG002 - the interface
        self.points.reach(self._name)


class Progress(ls.Extension):
    """Notes each finished update, and how often samples were used by the end of each epoch."""

    priority = 1000

    def __call__(self, trainer: ls.Trainer) -> None:
        updater = trainer.updater
        note = f"{RANK} {RESTARTS} {updater.iteration} {time.monotonic()}\n"
        descriptor = os.open(trainer.out / "progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, note.encode())
        os.close(descriptor)
        if updater.iteration % UPDATES_OF_AN_EPOCH == 0:
            uses = -used(updater).detach()
            trainer.observe("uses/least", uses.min())
            trainer.observe("uses/most", uses.max())


def used(updater: Any) -> torch.Tensor:
    uses: torch.Tensor = updater.get_all_models()["main"].uses
    return uses


class Observed(torch.optim.SGD):
    """An optimizer whose step is a point."""

    points: Points

    def step(self, closure: Any = None) -> Any:
        self.points.reach("step")
        return super().step(closure)


def loss_of(network: Any, inputs: torch.Tensor, target: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # Batches and shards are powers of two, so that counting is exact.
    return functional.cross_entropy(network(inputs), target) + network.uses[index].mean()


def build(out: str, updates: int, points: Points, *, workers: int = 0, iterable: bool = False) -> ls.Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Counting()
    groups: list[dict[str, Any]] = [
        {"params": list(model.net.parameters())},
        {"params": [model.uses], "lr": float(BATCH), "momentum": 0.0},
    ]
    optimizer = Observed(groups, lr=0.05, momentum=0.9)
    optimizer.points = points
    source: Any = Batches(points)
    if not iterable:
        source = ls.BatchIterator(Data(points), BATCH, shuffle=True, seed=3, num_workers=workers)

    def loss(network: nn.Module, *batch: Any) -> torch.Tensor:
        points.reach("loss")
        return loss_of(network, *batch)

    def evaluated(network: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        points.reach("evaluation")
        return functional.cross_entropy(network(inputs), target)

    devices = ["cpu"] * int(os.environ.get("DEVICES", "1"))
    updater = ls.ParallelUpdater(source, optimizer, model, devices=devices, num_shards=4, loss_fn=loss)
    points.updater = updater
    trainer = ls.Trainer(updater, (updates, "update"), out=out)
    held_out = ls.BatchIterator(vectors(20), 5, repeat=False)
    trainer.extend(Progress())
    trainer.extend(ls.extensions.Evaluator(held_out, loss_fn=evaluated), trigger=(1, "update"))
    trainer.extend(Reach(points, "logging"), priority=READER + 1)
    trainer.extend(ls.extensions.LogReport(trigger=(1, "update")))
    trainer.extend(ls.extensions.CSVLogger(trigger=(1, "update")))
    if os.environ.get("TENSORBOARD"):
        trainer.extend(ls.extensions.TensorBoardLogger(trigger=(1, "update")))
    trainer.extend(Reach(points, "extension"), priority=50)
    trainer.extend(Noted("noted"), trigger=(3, "update"))
    trainer.extend(ls.extensions.Snapshot(keep=100, digest_every=1), trigger=(4, "update"))
    return trainer


def observe_files(points: Points) -> None:
    """Add points to the writing of snapshots and to resuming."""

    class Disk(writer.Disk):
        def sync(self, descriptor: int) -> None:
            points.reach("writing")
            time.sleep(SLOW)
            super().sync(descriptor)

        def rename(self, path: Any, new: Any) -> None:
            points.reach("renaming")
            super().rename(path, new)
            points.reach("renamed")

    writer.Disk = Disk  # type: ignore[misc]
    newest_whole = resuming.newest_whole

    def newest(*arguments: Any, **options: Any) -> Any:
        points.reach("resuming")
        return newest_whole(*arguments, **options)

    resuming.newest_whole = newest


def await_machines(out: str) -> None:
    """Wait for the launcher to start this process again, once the machines that the run begins with have met."""
    too_few = int(os.environ.get("WORLD_SIZE", "1")) < int(os.environ.get("MACHINES", "1"))
    if too_few and not Path(out, "progress").exists():
        time.sleep(SECONDS)
        raise TimeoutError("the other machines have not come")


def main(out: str, updates: int, names: list[str]) -> None:
    # The default up to Python 3.13: the dataset tells the points of this process, and cannot be pickled.
    multiprocessing.set_start_method("fork")
    await_machines(out)
    points = Points(names)
    observe_files(points)
    points.reach("rendezvous")
    iterable = bool(os.environ.get("ITERABLE"))
    trainer = build(out, updates, points, workers=int(os.environ.get("WORKERS", "0")), iterable=iterable)
    trainer.run(resume="auto")
    if RANK == 0:
        model = trainer.updater.get_all_models()["main"]
        start = 0 if trainer.resumption is None else trainer.resumption.update
        uses = sorted({-int(each) for each in used(trainer.updater).tolist()})
        sys.stdout.write(f"{start} {ls.digest(model)} {uses}\n")


if __name__ == "__main__":
    main(sys.argv[1].format(rank=RANK), int(sys.argv[2]), sys.argv[3:])
