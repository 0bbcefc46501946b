"""What loss scaling costs an update, beside torch's GradScaler, on one core.

The update is that of a small network in bfloat16 autocast: forward, backward, scaling, step. All ways
take turns, update by update, so that what disturbs one disturbs all; what is reported is the median
of the ratios to the same update without scaling, and the part of an update's time that scaling takes.
Time is that of the thread, into which what other programs take from the core does not enter.

    python benchmarks/scaling.py --updates 200 --width 256
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from lockstep.precision import DynamicLossScale, LossScaler

Step = Callable[[torch.Tensor], None]


def build(width: int, *, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the same network and optimizer each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Give a loss under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    return output.float().square().mean()


def plain(width: int, *, fused: bool) -> Step:
    """Update without scaling."""
    model, optimizer = build(width, fused=fused)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return step


def scaled(scaler: LossScaler | torch.amp.GradScaler, width: int, *, fused: bool) -> Step:
    """Update with either scaler, by the same four lines."""
    model, optimizer = build(width, fused=fused)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def ways(width: int) -> dict[str, Step]:
    """List what is compared, by name."""
    found: dict[str, Step] = {}
    for fused in (False, True):
        kind = "fused AdamW" if fused else "AdamW"
        found[f"{kind}: plain"] = plain(width, fused=fused)
        found[f"{kind}: GradScaler"] = scaled(torch.amp.GradScaler("cpu"), width, fused=fused)
        dynamic = DynamicLossScale(2.0**16)
        found[f"{kind}: LossScaler"] = scaled(LossScaler(dynamic), width, fused=fused)
    return found


def measure(steps: dict[str, Step], x: torch.Tensor, num_updates: int) -> dict[str, list[float]]:
    """Time every way, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_updates + 10):
        for name, step in steps.items():
            began = time.thread_time()
            step(x)
            if number >= 10:  # the first ones make the state
                seconds[name].append(time.thread_time() - began)
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=200, help="timed updates of each way")
    parser.add_argument("--width", type=int, default=256, help="features of each layer")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.batch_size, arguments.width)
    seconds = measure(ways(arguments.width), x, arguments.updates)
    print(f"{'':24}{'ms':>8}{'ratio to plain':>16}{'µs more':>10}")
    for name, times in seconds.items():
        base = seconds[f"{name.split(':')[0]}: plain"]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
        more = statistics.median(mine - theirs for mine, theirs in zip(times, base, strict=True))
        print(f"{name:24}{statistics.median(times) * 1e3:8.3f}{ratio:16.3f}{more * 1e6:10.1f}")


if __name__ == "__main__":
    main()
