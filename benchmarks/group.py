"""Measure the time and the memory of a ReplicaGroup, compared with the module alone.

    python benchmarks/group.py [--rounds 40]

Overhead: forward and backward of a group of one device compared with the module alone, both on one intra-op
thread, in alternating order; the median of the differences and of the ratios. Speed: a group of two devices
compared with the module on two intra-op threads, in the same way. Memory: the additional memory of the process
when a group of four devices has created its replicas, and after a forward and backward.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import lockstep as ls


def mlp(width: int, layers: int) -> nn.Module:
    """Create linear layers of one width."""
    parts = [nn.Linear(width, width) if index % 2 == 0 else nn.ReLU() for index in range(2 * layers - 1)]
    return nn.Sequential(*parts)


def convnet() -> nn.Module:
    """Create a small convnet with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


# The model, the shape of a batch, and the number of steps in one timing.
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP, 4 layers of 32, batch 32": (lambda: mlp(32, 4), (32, 32), 100),
    "MLP, 4 layers of 512, batch 256": (lambda: mlp(512, 4), (256, 512), 10),
    "convnet, batch 64 of 3x32x32": (convnet, (64, 3, 32, 32), 2),
}


def module_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a forward and backward of the module alone."""

    def step() -> None:
        model.zero_grad()
        out = model(x)
        out.backward(torch.ones_like(out))

    return step


def group_step(group: ls.ReplicaGroup, x: torch.Tensor) -> Callable[[], None]:
    """Return a forward and backward of a group."""

    def step() -> None:
        out = group.forward(x)
        group.backward(torch.ones_like(out))

    return step


def seconds(step: Callable[[], None], steps: int, threads: int) -> float:
    """Return the mean time of a step in seconds."""
    torch.set_num_threads(threads)
    # Not timed: the first step after a change of the number of threads is slower.
    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def compare(name: str, devices: int, rounds: int) -> str:
    """Time a group of several devices and the module on as many intra-op threads, and return a row of the table."""
    make, shape, steps = WORKLOADS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    with ls.ReplicaGroup(make(), ["cpu"] * devices) as group:
        ways = [(group_step(group, x), 1), (module_step(model, x), devices)]
        spent: list[tuple[float, float]] = []
        for number in range(rounds):
            order = (0, 1) if number % 2 else (1, 0)
            times = {which: seconds(ways[which][0], steps, ways[which][1]) for which in order}
            spent.append((times[0], times[1]))
    ratio = statistics.median(ours / theirs for ours, theirs in spent)
    more = statistics.median(ours - theirs for ours, theirs in spent)
    mine = statistics.median(ours for ours, _ in spent)
    return f"{name:34} {devices} {ratio:6.2f} {more * 1e6:10.0f} us {mine * 1e3:9.2f} ms"


def resident() -> float:
    """Return the resident memory of the process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def trim() -> None:
    """Return free memory to the operating system, which the process would otherwise keep."""
    ctypes.CDLL(None).malloc_trim(0)


def measure_memory(*, device_grads: bool) -> str:
    """Measure the memory of four replicas of a model of 200 MB."""
    model = nn.Sequential(*[nn.Linear(2500, 2500) for _ in range(8)])
    x = torch.randn(64, 2500)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e6
    with ls.ReplicaGroup(model, ["cpu"] * 4, device_grads=device_grads) as group:
        before = resident()
        replicas = len(group.replicas)
        built = resident() - before
        out = group.forward(x, training=True)
        group.backward(torch.ones_like(out))
        after = resident() - before
        # The next forward releases the gradients per device of the last backward.
        group.forward(x, training=True)
        trim()
        at_rest = resident() - before
    return (
        f"{replicas} replicas of a model of {size:.0f} MB: {built:+.0f} MB when built, "
        f"{after:+.0f} MB after a backward, and {at_rest:+.0f} MB when the next forward has released it "
        f"(the sum alone: {size:.0f} MB; device_grads={device_grads})"
    )


def main() -> None:
    """Print a row for each workload and number of devices, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.rounds} rounds")
    print(f"{'':34} D  ratio   difference   per step")
    for name in WORKLOADS:
        for devices in (1, 2):
            print(compare(name, devices, arguments.rounds), flush=True)
    print(measure_memory(device_grads=True))
    print(measure_memory(device_grads=False))


if __name__ == "__main__":
    main()
