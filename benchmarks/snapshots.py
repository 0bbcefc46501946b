"""Measure what snapshots cost: the time for which training is blocked, and the slowdown of a whole run.

    python benchmarks/snapshots.py                     both, 8 rounds
    python benchmarks/snapshots.py --rounds 4 --updates 200

Each round runs the same updates without and with snapshots, in alternating order, on both cores (two devices). The
slowdown is the median over rounds of (time with) / (time without) - 1, until the last snapshot is durable; "processor"
is the same for the processor time of all threads. Blocked time is that of one call of the extension, compared with a
copy of the same tensors into warm memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


WARM_UP = 10
"""Updates that are not measured."""

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


class Cost(NamedTuple):
    """What a run costs from its tenth update on: threads and memory are warm by then.

    Attributes:
        seconds: The time until the last snapshot is durable.
        processor: The processor time of all threads, which other programs disturb less.
        blocked: The times for which training waited.
    """

    seconds: float
    processor: float
    blocked: list[float]


def cost_of_run(name: str, folder: Path, updates: int, every: int | None) -> Cost:
    """Run with a snapshot at every interval, or without any, and return what it costs."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    trainer = build(name, out, updates)
    started: list[float] = []

    def start(_: ls.Trainer) -> None:
        started.extend([time.perf_counter(), time.process_time()])

    trainer.extend(start, trigger=ls.triggers.ManualSchedule(WARM_UP, "update"))
    snapshot = Timed()
    if every is not None:
        trainer.extend(snapshot, trigger=(every, "update"))
    trainer.run()
    return Cost(time.perf_counter() - started[0], time.process_time() - started[1], snapshot.blocked)


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


def processor_share(name: str, folder: Path) -> float:
    """Return the processor time of a snapshot, of all threads, divided by that of an update."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    trainer = build(name, folder / "run", WARM_UP)
    trainer.run()
    updater = trainer.updater
    times: dict[str, list[float]] = {"update": [], "snapshot": []}
    with ls.snapshots.SnapshotWriter(folder / "run", run_id="benchmark") as writer:
        collector = ls.snapshots.Collector(updater, run_id="benchmark")
        for _ in range(12):
            start = time.process_time()
            updater.update()
            middle = time.process_time()
            writer.save(collector.collect(surroundings=trainer.surroundings()), must=True)
            writer.wait()
            times["update"].append(middle - start)
            times["snapshot"].append(time.process_time() - middle)
    updater.finalize()
    # The first ones allocate memory.
    return statistics.median(times["snapshot"][2:]) / statistics.median(times["update"][2:])


def main() -> None:
    """Measure both models with a snapshot every 100 and every 10 updates, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="at least 2; 0 for the processor time of a snapshot only")
    parser.add_argument("--updates", type=int, default=200, help="updates per run, at least 200")
    options = parser.parse_args()
    if options.rounds == 1 or options.updates < 200:
        # Quartiles need two rounds, and blocked times two snapshots per run, as the first one is not counted.
        parser.error("--rounds must not be 1, and --updates must be at least 200")
    head = f"{'model':8}{'every':>6}{'ms/update':>11}{'slowdown':>10}{'(quartiles)':>17}{'processor':>11}"
    print(f"{head}{'blocked ms':>12}{'warm copy ms':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            copy = warm_copy(name)
            share = processor_share(name, Path(folder))
            for every in (100, 10) if options.rounds else ():
                measure(name, every, Path(folder), copy, options)
            print(f"{name}: processor time of a snapshot / {every_text(share)}, warm copy {1e3 * copy:.2f} ms")


def every_text(share: float) -> str:
    """Return the processor time of a snapshot as a share of that of 100 and of 10 updates."""
    return f"of 100 updates {share / 100:.2%}, of 10 updates {share / 10:.2%}"


def measure(name: str, every: int, folder: Path, copy: float, options: argparse.Namespace) -> None:
    """Measure one model and interval in interleaved rounds, and print a line."""
    plain, blocked = list[float](), list[float]()
    ratios: tuple[list[float], list[float]] = ([], [])
    for index in range(options.rounds):
        found: dict[int | None, Cost] = {}
        # The order changes from round to round, because a machine slows down and recovers.
        for each in (None, every) if index % 2 else (every, None):
            found[each] = cost_of_run(name, folder, options.updates, each)
        plain.append(found[None].seconds / (options.updates - WARM_UP))
        ratios[0].append(found[every].seconds / found[None].seconds - 1)
        ratios[1].append(found[every].processor / found[None].processor - 1)
        blocked += found[every].blocked[1:]  # the first call allocates the buffers
    low, middle, high = statistics.quantiles(ratios[0], n=4)
    spread = f"({low:.1%} to {high:.1%})"
    wait, processor = 1e3 * statistics.median(blocked), statistics.median(ratios[1])
    line = f"{name:8}{every:>6}{1e3 * statistics.median(plain):>11.2f}{middle:>10.1%}{spread:>17}{processor:>11.1%}"
    print(f"{line}{wait:>12.2f}{1e3 * copy:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
