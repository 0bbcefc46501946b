"""Measure what snapshots cost: the time for which training is blocked, and the slowdown of a whole run.

    python benchmarks/snapshots.py                     both models, 60 pairs of blocks, about two minutes on two cores
    python benchmarks/snapshots.py --pairs 200

A run on two devices, which keep both cores busy, takes a snapshot at the start of every other block of ten updates.
The cost of a snapshot is the median over blocks of (time of a block with a snapshot) - (mean of the blocks before and
after it, without one): the writing is over long before the next block. "processor" is the same for the processor time
of all threads. Divided by the time of ten or of a hundred updates, it is the slowdown of a run with a snapshot every
10 or every 100 updates. Blocked time is that of one call of the extension, beside a copy of the same tensors into
memory that is in use already.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls


def mlp() -> tuple[nn.Module, tuple[int, ...], int]:
    """Create a network of 2 million parameters, its input shape and the batch size."""
    return (
        nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
        (784,),
        256,
    )


def convnet() -> tuple[nn.Module, tuple[int, ...], int]:
    """Create a convolutional network with batch norm, its input shape and the batch size."""
    blocks: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        blocks += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, 10)), (3, 32, 32), 64


BLOCK = 10
"""Updates from one time that is taken to the next."""
WARM_UP = 2
"""Pairs of blocks that are not measured: threads start and memory is allocated."""

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...], int]]] = {"mlp": mlp, "convnet": convnet}


class Timed(ls.extensions.Snapshot):
    """Measures how long each call blocks training, in seconds."""

    def __init__(self) -> None:
        super().__init__(keep=2)
        self.blocked: list[float] = []

    def __call__(self, trainer: ls.Trainer) -> None:
        """Take a snapshot, and measure how long it takes."""
        start = time.perf_counter()
        super().__call__(trainer)
        self.blocked.append(time.perf_counter() - start)


def build(name: str, out: Path, updates: int) -> ls.Trainer:
    """Create a run on two devices."""
    torch.manual_seed(0)
    model, shape, batch_size = MODELS[name]()
    samples = TensorDataset(torch.randn(4 * batch_size, *shape), torch.randint(10, (4 * batch_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, batch_size, shuffle=True),
        optimizer,
        model,
        devices=["cpu", "cpu"],
        num_shards=2,
        loss_fn=ls.supervised(functional.cross_entropy),
    )
    return ls.Trainer(updater, (updates, "update"), out=out)


def warm_copy(name: str) -> float:
    """Return the seconds of a copy of weights, buffers and momentum into memory that is in use already."""
    model, _, _ = MODELS[name]()
    tensors = [*model.state_dict().values(), *(each.detach().clone() for each in model.parameters())]
    kept = [torch.empty_like(each) for each in tensors]
    times = []
    for _ in range(50):
        start = time.perf_counter()
        torch._foreach_copy_(kept, tensors)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def differences(times: list[float]) -> list[float]:
    """Return what the blocks with a snapshot took more than the mean of those before and after them.

    Args:
        times: The times at which the blocks begin, the first of them without a snapshot.
    """
    blocks = [after - before for before, after in itertools.pairwise(times)]
    return [blocks[i] - (blocks[i - 1] + blocks[i + 1]) / 2 for i in range(1 + 2 * WARM_UP, len(blocks) - 1, 2)]


def measure(name: str, out: Path, pairs: int) -> None:
    """Measure one model, and print a line."""
    trainer = build(name, out, BLOCK * (2 * (pairs + WARM_UP) + 2))
    clock, processor = list[float](), list[float]()

    def take_times(_: ls.Trainer) -> None:
        clock.append(time.perf_counter())
        processor.append(time.process_time())

    snapshot = Timed()
    trainer.extend(take_times, trigger=(BLOCK, "update"), priority=snapshot.priority + 1)
    trainer.extend(snapshot, trigger=(2 * BLOCK, "update"))
    trainer.run()
    copy = warm_copy(name)
    low, seconds, high = statistics.quantiles(differences(clock), n=4)
    busy = statistics.median(differences(processor))
    update = statistics.median(after - before for before, after in itertools.pairwise(clock)) / BLOCK
    cores = (processor[-1] - processor[0]) / (clock[-1] - clock[0])
    wait = statistics.median(snapshot.blocked[WARM_UP:])
    print(f"{name}: an update takes {1e3 * update:.2f} ms on {cores:.2f} cores")
    print(f"  a snapshot costs {1e3 * seconds:.1f} ms (quartiles {1e3 * low:.1f} to {1e3 * high:.1f})")
    print(
        f"    every 100 updates {seconds / update / 100:.2%}, every 10 updates {seconds / update / 10:.2%} of the time"
    )
    share = busy / update / cores
    print(f"  {1e3 * busy:.1f} ms of the processor: {share / 100:.2%} and {share / 10:.2%} of the processor time")
    print(f"  blocked for {1e3 * wait:.2f} ms; a copy into warm memory takes {1e3 * copy:.2f} ms", flush=True)


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="blocks with a snapshot, at least 2")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="repeat; default both")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2, because quartiles need as many")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.model or MODELS:
            measure(name, Path(folder, name), options.pairs)


if __name__ == "__main__":
    main()
