"""What DataParallel costs beside the bare module on one device, and what several devices gain.

A step is forward, a mean of squares, and backward. All ways take turns, step by step, so that what disturbs
one disturbs all; reported is the median over steps of the ratio to the bare module with one intra-op thread,
and the difference in microseconds.

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

WARM = 10  # steps that are not timed


@dataclass(frozen=True)
class Workload:
    """A module and what it is given."""

    name: str
    module: nn.Module
    batch: torch.Tensor


def workloads() -> list[Workload]:
    """List modules from one that takes microseconds to one that takes tens of milliseconds."""
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
    """Make one step with so many intra-op threads in the calling thread."""

    def step() -> None:
        torch.set_num_threads(threads)
        for parameter in module.parameters():
            parameter.grad = None
        module(batch).square().mean().backward()

    return step


def ways(workload: Workload) -> dict[str, Callable[[], None]]:
    """List what is compared, the bare module with one thread first."""

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
    watched = parallel(1, 1)
    assert isinstance(watched, ls.DataParallel)
    watched.install_monitor(ls.Monitor(interval=10))
    return found | {"1 device, monitor at rest": step_of(watched, workload.batch, 1)}


def measure(steps: dict[str, Callable[[], None]], num_steps: int) -> dict[str, list[float]]:
    """Time every way, taking turns in changing order, for what went before warms or cools caches."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)  # noqa: S311 - no secret
    for number in range(num_steps + WARM):
        for name in order.sample(list(steps), len(steps)):
            began = time.perf_counter()
            steps[name]()
            if number >= WARM:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each way")
    parser.add_argument("--only", default="", help="the beginning of a workload's name")
    options = parser.parse_args()
    for workload in workloads():
        if not workload.name.startswith(options.only):
            continue
        seconds = measure(ways(workload), options.steps)
        base = seconds["bare, 1 thread"]
        print(f"{workload.name:28}{'ms':>9}{'ratio to bare':>16}{'µs more':>10}")
        for name, times in seconds.items():
            ratio = statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
            more = statistics.median(mine - theirs for mine, theirs in zip(times, base, strict=True))
            print(f"  {name:26}{statistics.median(times) * 1e3:9.3f}{ratio:16.3f}{more * 1e6:10.0f}")


if __name__ == "__main__":
    main()
