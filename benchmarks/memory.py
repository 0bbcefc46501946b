"""Measure the memory of data-parallel training: bytes per parameter above the base.

    python benchmarks/memory.py                                 two processes, all ways, one after another
    python benchmarks/memory.py --ranks 4 --ways sharded ddp

Each way trains a multilayer perceptron of 32 million parameters in float32 with AdamW, on batches of 8 shards, or on
as many micro-batches with `no_sync`. The base is the resident memory of a process that has trained a tiny model in the
same way. The peak is the largest resident memory, as Linux counts it; the steady memory is that between two updates.
Both are means over the ranks. The time of an update is a median, to compare with the
others of this run only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls

WIDTH, DEPTH, SHARDS, UPDATES = 2000, 8, 8, 6
WAYS = ("lockstep", "sharded", "ddp", "zero", "fsdp2")


def create_model(width: int) -> nn.Sequential:
    """Create the model, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss that reaches all parameters."""
    loss: torch.Tensor = model(x).square().mean()
    return loss


def lockstep_update(width: int, *, shard: bool) -> Callable[[], object]:
    """Return a function that makes one update with lockstep."""
    model = create_model(width)
    adamw = torch.optim.AdamW(model.parameters())
    batches = ls.BatchIterator(torch.randn(64, width), 2 * SHARDS)
    updater = ls.ParallelUpdater(
        batches, adamw, model, devices=1, num_shards=SHARDS, loss_fn=loss_of, shard_optimizer=shard
    )
    return updater.update


def torch_update(way: str, width: int) -> Callable[[], object]:
    """Return a function that makes one update with the tools of torch."""
    model, ranks = create_model(width), dist.get_world_size()
    wrapped: nn.Module = model
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - takes seconds

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    adamw: torch.optim.Optimizer
    if way == "zero":
        adamw = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    else:
        adamw = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, width)

    def update() -> None:
        adamw.zero_grad()
        for index in range(count := SHARDS // ranks):
            last = index == count - 1
            if way == "fsdp2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]  # added by `fully_shard`
            with nullcontext() if last or way == "fsdp2" else wrapped.no_sync():  # type: ignore[operator]  # DDP's
                (loss_of(wrapped, x) / count).backward()  # type: ignore[no-untyped-call]  # torch's gap
        adamw.step()

    return update


def update_of(way: str, width: int) -> Callable[[], object]:
    """Return a function that makes one update of a model of this width."""
    if way in {"lockstep", "sharded"}:
        return lockstep_update(width, shard=way == "sharded")
    return torch_update(way, width)


def memory(field: str) -> int:
    """Return a field of the status of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def measure(way: str) -> None:
    """Train in one way, and print what it took on rank 0."""
    torch.set_num_threads(1)
    communicator = ls.find_communicator()
    if way not in {"lockstep", "sharded"} and not dist.is_initialized():
        dist.init_process_group("gloo")  # of one process, by the variables of `launch`
    # What the first updates of any model load does not belong to this one.
    update = update_of(way, width=8)
    for _ in range(UPDATES):
        update()
    base = memory("VmRSS")
    update = update_of(way, WIDTH)
    seconds = []
    for _ in range(UPDATES):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    count = DEPTH * (WIDTH * WIDTH + WIDTH)
    own = torch.tensor([memory("VmHWM") - base, memory("VmRSS") - base], dtype=torch.float64) / count
    communicator.all_reduce([own])
    peak, steady = (own / communicator.size).tolist()
    if communicator.rank == 0:
        print(
            f"| {communicator.size} | {way} | {peak:.1f} | {steady:.1f} | {statistics.median(seconds[2:]) * 1e3:.0f} |"
        )


def main() -> None:
    """Start the ranks of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    # Each rank is a process of its own, whose memory has held nothing else.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| ranks | way | peak, bytes per parameter | steady | ms per update |\n|--:|---|--:|--:|--:|", flush=True)
    for way in options.ways:
        ls.launch(measure, options.ranks, [way])


if __name__ == "__main__":
    main()
