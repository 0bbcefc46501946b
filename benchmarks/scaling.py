"""Measure the cost of loss scaling in an update, compared with torch's GradScaler, on one core or one GPU.

The update is that of a small network with bfloat16 autocast: forward, backward, scaling, step. All variants take
turns, update by update, so that disturbances affect all of them. It prints the median of the ratios to the same
update without scaling, the time that scaling takes, and how often the host synchronizes with the device in an
update, as counted by the profiler. On a CPU the time is that of the thread, which excludes other programs, and
synchronizations are reads of numbers, which cost nothing there; on a GPU each update is timed until the end of its
last kernel.

    python benchmarks/scaling.py --updates 200 --width 256
    python benchmarks/scaling.py --updates 200 --width 1024 --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import lockstep as ls
from lockstep.precision import DynamicLossScale, LossScaler

SYNCHRONIZATIONS = {
    "cpu": {"aten::_local_scalar_dense"},
    "cuda": {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"},
}
"""The names of the profiler for synchronizations of the host, by the type of the device."""

Step = Callable[[torch.Tensor], None]


def build(width: int, *, device: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create the network and its optimizer, with the same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute the loss under autocast."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        output = model(x)
    return output.float().square().mean()


def plain(width: int, *, device: str, fused: bool) -> Step:
    """Return an update without scaling."""
    model, optimizer = build(width, device=device, fused=fused)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return step


def scaled(scaler: LossScaler | torch.amp.GradScaler, width: int, *, device: str, fused: bool) -> Step:
    """Return an update with either scaler, which have the same interface."""
    model, optimizer = build(width, device=device, fused=fused)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def updated(width: int, x: torch.Tensor, *, fused: bool) -> Step:
    """Return an update of an updater that skips batches that overflow."""
    model, optimizer = build(width, device=str(x.device), fused=fused)
    updater = ls.ParallelUpdater(
        Batches(x),
        optimizer,
        model,
        devices=[x.device],
        loss_fn=loss_of,
        loss_scale=DynamicLossScale(2.0**16),
        on_overflow="skip",
    )
    return lambda _: updater.update()


class Batches:
    """An endless iterable over one batch."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __iter__(self) -> Iterator[torch.Tensor]:
        return repeat(self._x)


def variants(width: int, x: torch.Tensor) -> dict[str, Step]:
    """Return the updates to compare, by name."""
    found: dict[str, Step] = {}
    device, scale = str(x.device), DynamicLossScale(2.0**16)
    for fused in (False, True):
        kind = "fused AdamW" if fused else "AdamW"
        grad_scaler = torch.amp.GradScaler(x.device.type)
        found[f"{kind}: plain"] = plain(width, device=device, fused=fused)
        found[f"{kind}: GradScaler"] = scaled(grad_scaler, width, device=device, fused=fused)
        found[f"{kind}: LossScaler"] = scaled(LossScaler(scale), width, device=device, fused=fused)
        found[f"{kind}: updater"] = updated(width, x, fused=fused)
    return found


def measure(steps: dict[str, Step], x: torch.Tensor, num_updates: int) -> dict[str, list[float]]:
    """Time all variants in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.thread_time if x.device.type == "cpu" else time.perf_counter
    for number in range(num_updates + 10):
        for name, step in steps.items():
            start = clock()
            step(x)
            # Kernels run asynchronously: without this, only their launch would be timed.
            if x.device.type == "cuda":
                torch.cuda.synchronize()
            # The first updates create the state of the optimizer.
            if number >= 10:
                seconds[name].append(clock() - start)
    return seconds


def synchronizations(step: Step, x: torch.Tensor, num_updates: int = 10) -> float:
    """Count the synchronizations of the host with the device per update."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if x.device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        for _ in range(num_updates):
            with record_function("one update"):
                step(x)
    events = list(profiled.events())
    updates = [event.time_range for event in events if event.name == "one update"]
    found = [event.time_range for event in events if event.name in SYNCHRONIZATIONS[x.device.type]]
    # The profiler itself synchronizes once after the last update.
    inside = [each for each in found if any(one.start <= each.start <= one.end for one in updates)]
    return len(inside) / num_updates


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="timed updates per variant")
    parser.add_argument("--width", type=int, default=256, help="the number of features per layer")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per batch")
    parser.add_argument("--device", choices=list(SYNCHRONIZATIONS), default="cpu", help="the device")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.batch_size, arguments.width, device=arguments.device)
    steps = variants(arguments.width, x)
    seconds = measure(steps, x, arguments.updates)
    print(f"{'':24}{'ms':>8}{'ratio to plain':>16}{'µs more':>10}{'syncs':>8}")
    for name, times in seconds.items():
        base = seconds[f"{name.split(':')[0]}: plain"]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
        more = statistics.median(mine - theirs for mine, theirs in zip(times, base, strict=True))
        figures = f"{statistics.median(times) * 1e3:8.3f}{ratio:16.3f}{more * 1e6:10.1f}"
        print(f"{name:24}{figures}{synchronizations(steps[name], x):8.1f}")


if __name__ == "__main__":
    main()
