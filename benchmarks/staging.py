"""Measure how long a snapshot blocks training: the copy into kept buffers, beside a copy that does nothing else.

    python benchmarks/staging.py

For each size, a bare `torch._foreach_copy_` into buffers that exist already and the whole of what `SnapshotWriter.save`
does before it returns, but the start of its thread, take turns. The bar is 1.5 times the bare copy and 1 ms. It prints
the medians and the 99th percentile in milliseconds, and the ratio of the median to the bar; below 1 is within it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lockstep.snapshots import Content
from lockstep.snapshots.commit import Buffers, stage

SIZES = ((40, 0.8), (40, 15.0), (40, 100.0), (2000, 2.0), (2000, 15.0))
"""Numbers of tensors, with their size in MB altogether."""
ROUNDS = 200


def content(count: int, megabytes: float) -> Content:
    """Create a model whose optimizer keeps one momentum per parameter."""
    tensors = [torch.randn(int(megabytes * 250_000 / count)) for _ in range(count)]
    half = count // 2
    momenta = {index: {"momentum_buffer": tensor} for index, tensor in enumerate(tensors[half:])}
    groups = [{"lr": 0.1, "momentum": 0.9, "params": list(range(half))}]
    return Content(
        progress={"update": 1},
        run_id="benchmark",
        models={"main": {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors[:half])}},
        state={"optimizer": {"state": momenta, "param_groups": groups}},
    )


def milliseconds(action: Callable[[], object]) -> float:
    """Measure how long a call takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def measure(count: int, megabytes: float) -> tuple[list[float], list[float]]:
    """Measure the bare copy and the staging in turn, in milliseconds."""
    saved, buffers = content(count, megabytes), Buffers()
    sources = list(stage(saved, ()).tensors)
    kept = [torch.empty_like(tensor) for tensor in sources]
    bare, staged = [], []
    for _ in range(ROUNDS):
        bare.append(milliseconds(lambda: torch._foreach_copy_(kept, sources)))
        staged.append(milliseconds(lambda: buffers.copy(stage(saved, ()).tensors)))
    return bare[5:], staged[5:]


def main() -> None:
    """Print a row per size."""
    torch.set_num_threads(1)
    print("tensors      MB   bare copy   staged   p99   staged / bar")
    for count, megabytes in SIZES:
        bare, staged = measure(count, megabytes)
        copy, blocked = statistics.median(bare), statistics.median(staged)
        late, bar = statistics.quantiles(staged, n=100)[-1], 1.5 * copy + 1
        print(f"{count:7} {megabytes:7.1f} {copy:11.2f} {blocked:8.2f} {late:5.2f} {blocked / bar:14.2f}")


if __name__ == "__main__":
    main()
