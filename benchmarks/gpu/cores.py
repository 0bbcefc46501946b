"""Compare threads and processes on 1, 2, 4 ... pinned CPU cores with DDP and with processes that never communicate."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from models import Task
from report import Report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import digest_of

import lockstep as ls

NUM_SHARDS = 16
BATCH_SIZE = 256
NUM_FIRST = 5
"""The updates after which digests are compared; the timed ones follow."""

WORKLOADS = {
    "MLP": Task(
        lambda: nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
        (784,),
        optimizer=partial(torch.optim.SGD, momentum=0.9),
    ),
    "convnet": Task(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
        ),
        (3, 32, 32),
        optimizer=partial(torch.optim.SGD, momentum=0.9),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """What all ways of training have in common.

    Attributes:
        count: The number of cores.
        updates: The number of timed updates.
        batch_size: The number of samples of each update, over all cores.
    """

    count: int
    updates: int
    batch_size: int


Found: TypeAlias = "tuple[float, str | None]"
"""Samples per second of all processes, and the digest if it is to be compared."""
Way: TypeAlias = "Callable[[Task, Sizes], Found]"


def run(report: Report, options: Namespace) -> None:
    """Make the checks."""
    available = sorted(os.sched_getaffinity(0))
    counts = [count for count in options.cores if count <= len(available)]
    updates, batch_size = (3, 32) if options.small else (15, BATCH_SIZE)
    if len(counts) < len(options.cores):
        print(f"this process may use {len(available)} cores, so only n = {counts} are measured")
    for name in WORKLOADS:
        digests = set()
        for count in counts:
            limit = 0.0
            for way in (alone, threads, processes, ddp):
                title = f"{name}, {count} core{'s' if count > 1 else ''}: {TITLES[way.__name__]}"
                if not report.wants(title):
                    continue
                speed, digest = measure(way, name, available[:count], Sizes(count, updates, batch_size))
                limit = speed if way is alone else limit
                share = f", {speed / limit:.2f} of processes that never communicate" if limit else ""
                report.measure(title, partial(str, f"{speed:.0f} samples/s{share}"))
                if digest is not None:
                    digests.add(digest)
        if digests:
            report.check(f"{name}: digests of threads and processes over all n", 1, partial(len, digests))


def measure(way: Way, name: str, cores: Sequence[int], sizes: Sizes) -> Found:
    """Run the processes of one way."""
    ranks = 1 if way is threads else len(cores)
    found = ls.launch(on_rank, ranks, [way, name, list(cores), sizes])
    digests = {digest for _, digest in found}
    assert len(digests) == 1, f"the ranks have {len(digests)} digests"
    # The slowest process decides, because a batch needs all of them.
    return min(speed for speed, _ in found), digests.pop()


def on_rank(way: Way, name: str, cores: Sequence[int], sizes: Sizes) -> Found:
    """Run one process, which is pinned to its core, or to all of them if it is the only one."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, cores if ranks == 1 else {cores[rank]})
    torch.set_num_threads(1)
    return way(WORKLOADS[name], sizes)


def threads(task: Task, sizes: Sizes) -> Found:
    """One process with a thread per core."""
    return by_updater(task, sizes, sizes.count)


def processes(task: Task, sizes: Sizes) -> Found:
    """One process per core."""
    return by_updater(task, sizes, 1)


def by_updater(task: Task, sizes: Sizes, devices: int) -> Found:
    """Train by a ParallelUpdater."""
    model = task.model()
    updater = ls.ParallelUpdater(
        [task.batch(sizes.batch_size)],
        task.optimizer(model.parameters(), lr=0.01),
        model,
        devices=["cpu"] * devices,
        num_shards=NUM_SHARDS,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )
    for _ in range(NUM_FIRST):
        updater.update()
    found = digest_of(updater)
    speed = samples_per_second(updater.update, sizes)
    updater.finalize()
    return speed, found


def ddp(task: Task, sizes: Sizes) -> Found:
    """DistributedDataParallel over gloo, one process per core; its bits depend on their number."""
    if sizes.count == 1:
        return by_loop(task, task.model(), sizes), None
    dist.init_process_group("gloo")
    speed = by_loop(task, DistributedDataParallel(task.model()), sizes)
    dist.destroy_process_group()
    return speed, None


def alone(task: Task, sizes: Sizes) -> Found:
    """Processes that never communicate, each with its part of the batch."""
    return by_loop(task, task.model(), sizes), None


TITLES = {
    "alone": "processes that never communicate",
    "threads": "threads",
    "processes": "processes",
    "ddp": "DDP over gloo",
}


def by_loop(task: Task, model: nn.Module, sizes: Sizes) -> float:
    """Train by a plain loop on this process's part of the batch; return the samples per second of all parts."""
    optimizer = task.optimizer(model.parameters(), lr=0.01)
    rank = int(os.environ["RANK"])
    inputs, target = (each.chunk(sizes.count)[rank] for each in task.batch(sizes.batch_size))

    def update() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()

    for _ in range(NUM_FIRST):
        update()
    return samples_per_second(update, sizes)


def samples_per_second(update: Callable[[], object], sizes: Sizes) -> float:
    """Time updates one by one, and return the speed of the fastest, which other programs have disturbed least."""
    seconds = []
    for _ in range(sizes.updates):
        begin = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begin)
    return sizes.batch_size / min(seconds)
