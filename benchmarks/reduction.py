"""The ordered sum over ranks against plain all_reduce: time and bytes, interleaved in one run.

    python benchmarks/reduction.py                      # 2 to 4 ranks, 10 thousand to 25 million elements
    unshare -rn sh -c 'ip link set lo up && python benchmarks/reduction.py'     # with a loopback of its own

Both sum one float32 tensor over processes joined by gloo on the loopback. The ordered sum is made twice: of
one partial sum a rank (its shards form one node of the tree), and of two. Times are the medians of calls that
take turns, in another order each time. "bytes" are those that all ranks together hand to torch.distributed,
over those of a ring, 2·(W-1) times the tensor; "loopback" is what the interface counted, over the same, which
means something only where nobody else uses it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep import ProcessCommunicator
from lockstep.communicators import Contribution
from lockstep.communicators.failures.watch import Watch
from lockstep.tree import PartialSum

SIZES = [10_000, 100_000, 1_000_000, 5_000_000, 25_000_000]
MOST_REPEATS, FEWEST_REPEATS = 60, 8
ELEMENTS_A_CASE = 60_000_000
"""About so many elements are summed for each figure."""
WARM_UP = 2


def ordered(communicator: ProcessCommunicator, size: int, nodes: int) -> Callable[[], object]:
    """Prepare a sum of so many partial sums a rank."""
    runs = [range(nodes * rank, nodes * (rank + 1)) for rank in range(communicator.size)]
    contributions = [Contribution(tuple(run), (1,) * nodes) for run in runs]
    partials = [PartialSum(shard, [torch.ones(size)]) for shard in runs[communicator.rank]]
    like = [torch.empty(size)]

    def add_up() -> object:
        return communicator.sum_partials(partials, contributions, like, divisor=float(communicator.size))

    return add_up


def plain(size: int) -> Callable[[], object]:
    """Prepare a sum and a division in whatever order."""
    tensor = torch.ones(size)

    def add_up() -> object:
        dist.all_reduce(tensor)
        return tensor.div_(float(dist.get_world_size()))

    return add_up


def loopback_bytes() -> int:
    """Read what the loopback interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


def bytes_of(act: Callable[[], object], communicator: ProcessCommunicator) -> tuple[int, int]:
    """Give what one call makes all ranks hand over, and what the interface counts meanwhile."""
    communicator.barrier()
    before, interface = communicator.bytes_sent, loopback_bytes()
    dist.barrier()
    act()
    dist.barrier()
    handed = torch.tensor(communicator.bytes_sent - before)
    counted = loopback_bytes() - interface
    dist.all_reduce(handed)
    return int(handed), counted


def compare(communicator: ProcessCommunicator, size: int) -> str:
    """Measure one size; give a row of the table."""
    acts = {
        "plain": plain(size),
        "one": ordered(communicator, size, 1),
        "two": ordered(communicator, size, 2),
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, ELEMENTS_A_CASE // size))
    for turn in range(WARM_UP + repeats):
        # The same order on all ranks; who always came first would find the scheduler in his favour.
        for name in random.Random(turn).sample(list(acts), len(acts)):  # noqa: S311 - no secret
            dist.barrier()
            began = time.perf_counter()
            acts[name]()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    ring = 2 * (communicator.size - 1) * size * 4
    handed = {name: bytes_of(act, communicator) for name, act in acts.items()}
    median = {name: statistics.median(each) for name, each in times.items()}
    cells = [f"{communicator.size}", f"{size:,}", f"{median['plain'] * 1e3:.2f}"]
    for name in ("one", "two"):
        cells += [f"{median[name] / median['plain']:.2f}", f"{handed[name][0] / ring:.2f}"]
    cells += ["/".join(f"{handed[name][1] / ring:.2f}" for name in acts)]
    return "| " + " | ".join(cells) + " |"


def work(rank: int, size: int, folder: str, elements: list[int]) -> None:
    """Be one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    communicator = ProcessCommunicator(watch=Watch())
    for each in elements:
        row = compare(communicator, each)
        if rank == 0:
            print(row, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--elements", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    print("| ranks | elements | all_reduce, ms | one node | bytes | two nodes | bytes | loopback: all three |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (size, folder, options.elements), nprocs=size)


if __name__ == "__main__":
    main()
