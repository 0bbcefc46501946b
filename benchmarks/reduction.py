"""Compare the ordered sum over ranks with a plain all_reduce: time and bytes, interleaved in one run.

    python benchmarks/reduction.py                      # 2 to 4 ranks, 10 thousand to 25 million elements
    unshare -rn sh -c 'ip link set lo up && python benchmarks/reduction.py'     # with a private loopback

Both sum one float32 tensor over processes that are connected by gloo over the loopback. The ordered sum is measured
with one partial sum per rank (its shards form one node of the tree) and with two. Times are medians of calls that
take turns, in another order each time. "bytes" are the bytes that all ranks together pass to torch.distributed,
relative to those of a ring, 2·(W-1) times the tensor; "loopback" is what the interface counted, relative to the
same, which is meaningful only if nothing else uses the interface.
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
MAX_REPEATS, MIN_REPEATS = 60, 8
ELEMENTS_PER_CASE = 60_000_000
"""The approximate number of elements that are summed for each figure."""
WARM_UP_CALLS = 2


def ordered(communicator: ProcessCommunicator, size: int, nodes: int) -> Callable[[], object]:
    """Return a function that computes the ordered sum, with a number of partial sums per rank."""
    runs = [range(nodes * rank, nodes * (rank + 1)) for rank in range(communicator.size)]
    contributions = [Contribution(tuple(run), (1,) * nodes) for run in runs]
    partials = [PartialSum(shard, [torch.ones(size)]) for shard in runs[communicator.rank]]
    like = [torch.empty(size)]

    def add_up() -> object:
        return communicator.sum_partials(partials, contributions, like)

    return add_up


def plain(size: int) -> Callable[[], object]:
    """Return a function that computes the sum with all_reduce, and divides it."""
    tensor = torch.ones(size)

    def add_up() -> object:
        dist.all_reduce(tensor)
        return tensor.div_(float(dist.get_world_size()))

    return add_up


def loopback_bytes() -> int:
    """Return the number of bytes that the loopback interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


def bytes_of(act: Callable[[], object], communicator: ProcessCommunicator) -> tuple[int, int]:
    """Return the bytes that all ranks send in one call, and those that the interface counts."""
    communicator.barrier()
    # The barriers keep the messages of other calls out of the count.
    before, interface = communicator.bytes_sent, loopback_bytes()
    dist.barrier()
    act()
    dist.barrier()
    # Both counters are read before this sum over ranks, which sends bytes too.
    handed = torch.tensor(communicator.bytes_sent - before)
    counted = loopback_bytes() - interface
    dist.all_reduce(handed)
    return int(handed), counted


def compare(communicator: ProcessCommunicator, size: int) -> str:
    """Measure one size, and return a row of the table."""
    acts = {
        "plain": plain(size),
        "one": ordered(communicator, size, 1),
        "two": ordered(communicator, size, 2),
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, ELEMENTS_PER_CASE // size))
    for turn in range(WARM_UP_CALLS + repeats):
        # The same order on all ranks, which must make the same calls; and another order in each turn, because the
        # scheduler favors the process that has just waited.
        for name in random.Random(turn).sample(list(acts), len(acts)):  # noqa: S311 - not for cryptography
            dist.barrier()
            start = time.perf_counter()
            acts[name]()
            if turn >= WARM_UP_CALLS:
                times[name].append(time.perf_counter() - start)
    ring = 2 * (communicator.size - 1) * size * 4
    handed = {name: bytes_of(act, communicator) for name, act in acts.items()}
    median = {name: statistics.median(each) for name, each in times.items()}
    cells = [f"{communicator.size}", f"{size:,}", f"{median['plain'] * 1e3:.2f}"]
    for name in ("one", "two"):
        cells += [f"{median[name] / median['plain']:.2f}", f"{handed[name][0] / ring:.2f}"]
    cells += ["/".join(f"{handed[name][1] / ring:.2f}" for name in acts)]
    return "| " + " | ".join(cells) + " |"


def work(rank: int, size: int, folder: str, elements: list[int]) -> None:
    """Run the comparison on one rank."""
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
    """Parse the command line and print the table."""
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
