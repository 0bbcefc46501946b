"""Measure the cost of DataParallel on one device, and its gain on several, compared with the module alone.

A step is forward, a mean of squares, and backward. All variants take turns, step by step, so that disturbances
affect all of them. It prints the median over steps of the ratio to the bare module with one intra-op thread, and
the difference in microseconds.

    python benchmarks/modules.py --steps 200
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import lockstep as ls

WARM_UP_STEPS = 10  # which are not timed


@dataclass(frozen=True)
class Workload:
    """A module and its batch."""

    name: str
    module: nn.Module
    batch: torch.Tensor


def workloads() -> list[Workload]:
    """Create modules whose steps take from microseconds to tens of milliseconds."""
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    wide = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    conv = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16 * 16, 10),
    )
    return [
        Workload("tiny MLP", tiny, torch.randn(256, 32)),
        Workload("2 M MLP", wide, torch.randn(256, 512)),
        Workload("convnet", conv, torch.randn(128, 1, 16, 16)),
    ]


def step_of(module: nn.Module, batch: torch.Tensor, threads: int) -> Callable[[], None]:
    """Return a step that runs with a number of intra-op threads in the calling thread."""

    def step() -> None:
        # In every step, because variants with other numbers run in between.
        torch.set_num_threads(threads)
        for parameter in module.parameters():
            parameter.grad = None
        module(batch).square().mean().backward()

    return step


def variants(workload: Workload) -> dict[str, Callable[[], None]]:
    """Return the steps to compare, starting with the bare module with one thread."""

    def parallel(devices: int, shards: int | None, **options: bool) -> nn.Module:
        module = copy.deepcopy(workload.module)
        return ls.DataParallel(module, ["cpu"] * devices, num_shards=shards, **options)

    found = {
        "bare, 1 thread": step_of(copy.deepcopy(workload.module), workload.batch, 1),
        "1 device": step_of(parallel(1, 1), workload.batch, 1),
        "1 device, serial backward": step_of(parallel(1, 1, parallel_backward=False), workload.batch, 1),
        "bare, 2 threads": step_of(copy.deepcopy(workload.module), workload.batch, 2),
        "2 devices": step_of(parallel(2, None), workload.batch, 1),
        "2 devices, 8 shards": step_of(parallel(2, 8), workload.batch, 1),
    }
    # A monitor that is not due in a step should cost next to nothing.
    watched = parallel(1, 1)
    assert isinstance(watched, ls.DataParallel)
    watched.install_monitor(ls.Monitor(interval=10))
    return found | {"1 device, monitor at rest": step_of(watched, workload.batch, 1)}


def measure(steps: dict[str, Callable[[], None]], num_steps: int) -> dict[str, list[float]]:
    """Time all variants in turns, in changing order, because each step leaves the caches in another state."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)  # noqa: S311 - not for cryptography
    for number in range(num_steps + WARM_UP_STEPS):
        for name in order.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="timed steps per variant")
    parser.add_argument("--only", default="", help="the start of a workload's name")
    options = parser.parse_args()
    for workload in workloads():
        if not workload.name.startswith(options.only):
            continue
        seconds = measure(variants(workload), options.steps)
        base = seconds["bare, 1 thread"]
        print(f"{workload.name:28}{'ms':>9}{'ratio to bare':>16}{'µs more':>10}")
        for name, times in seconds.items():
            ratio = statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
            more = statistics.median(mine - theirs for mine, theirs in zip(times, base, strict=True))
            print(f"  {name:26}{statistics.median(times) * 1e3:9.3f}{ratio:16.3f}{more * 1e6:10.0f}")


if __name__ == "__main__":
    main()
