"""Measure what the checks of every update cost: updates with them and without them alternate in the same processes.

    python benchmarks/checks.py                       one process, then two, about two minutes on two cores
    python benchmarks/checks.py --processes 2 --rounds 200

The tiny MLP of `updates.py` is trained on prepared batches of 256 samples in two shards, on one device per process.
`CHECKS` lists the checks that are disabled for every other four updates. As a trainer does, each update computes what
it observed. The time of a round is the median over its updates, with and without the checks. It prints the median over
rounds of (time with the checks) - (time without) and of their ratio in the same round, with the quartiles. One process
is timed by its processor time, and two by the clock of the slower one. The targets: at most 10 µs in one process, and
at most 2 % of the update in two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from peers import set_environment
from torch.nn.functional import cross_entropy
from updates import ReadyBatches, free_port
from workloads import WORKLOADS

import lockstep as ls
from lockstep.data import Fingerprint
from lockstep.updaters.attempt.attempt import Described
from lockstep.updaters.ranks import coordinator, rank_reduction
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.state.training import TrainingState

SUCCESSIVE = 4  # updates with or without the checks: one on each batch, and one that compares a part of the state
ALLOWED_SECONDS: Final = 10e-6
ALLOWED_SHARE: Final = 0.02
NOT_DESCRIBED: Final = Described(0, "", Fingerprint(0, "", None))

CHECKS: Final[list[tuple[Any, str, Callable[..., Any]]]] = [
    # Ranks compare fingerprints of their batches.
    (rank_reduction, "describe_batch", lambda *_: NOT_DESCRIBED),
    # The process is not a fork of the one that built the updater.
    (coordinator.Coordinator, "check_process", lambda _: None),
    # The model is in training mode.
    (TrainingState, "ensure_training_mode", lambda _: None),
    # Skipped updates are counted, and do not count in means. Whether there is one is known anyway.
    (UpdateResult, "observation", UpdateResult.loss_and_metrics),
]
"""Where the checks are called, and what is called without them.

Draws from `random` and NumPy's generator are looked for in the first three updates only. An iterator that ends raises
an exception, for which nothing is checked before.
"""


class Switch:
    """Enables and disables the checks of this process.

    They stay wrapped in either case, so that both kinds of updates run the same code around them.
    """

    def __init__(self) -> None:
        self.enabled = True
        for owner, name, without in CHECKS:
            setattr(owner, name, self._switched(getattr(owner, name), without))

    def _switched(self, check: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return check(*args) if self.enabled else without(*args)

        return call


def serve(pipe: Connection, rank: int, port: int | None) -> None:
    """Run as many updates as requested with the checks and without them, and send how long one of each took."""
    if port is not None:
        set_environment(port, rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS["tiny"]
    model = workload.model()
    updater = ls.ParallelUpdater(
        ReadyBatches(workload.batches(slice(None))),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        devices=["cpu"],
        num_shards=2,
        loss_fn=ls.supervised(cross_entropy),
    )
    switch = Switch()
    clock = time.perf_counter if port is not None else time.thread_time
    pipe.send(None)
    while (turns := pipe.recv()) > 0:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * turns):
            switch.enabled = turn % 2 == 0
            begin = clock()
            for _ in range(SUCCESSIVE):
                updater.update().observation()
            seconds[switch.enabled].append((clock() - begin) / SUCCESSIVE)
        pipe.send({enabled: statistics.median(values) for enabled, values in seconds.items()})


def measure(processes: int, rounds: int, turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds per update with the checks and without them, one of each for every round."""
    context = get_context("spawn")
    port = free_port() if processes > 1 else None
    pipes = []
    for rank in range(processes):
        pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, rank, port), daemon=True).start()
        theirs.close()  # so that `recv` raises an error if the process ends
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    found = []
    for _ in range(1 + rounds):
        for pipe in pipes:
            pipe.send(turns)
        found.append([pipe.recv() for pipe in pipes])
    for pipe in pipes:
        pipe.send(0)
    # Without the first round, in which Python and the caches warm up.
    checked, unchecked = ([max(each[enabled] for each in ranks) for ranks in found[1:]] for enabled in (True, False))
    return checked, unchecked


def report(processes: int, rounds: int, turns: int) -> bool:
    """Print the cost of the checks; return whether the target was met."""
    checked, unchecked = measure(processes, rounds, turns)
    pairs = list(zip(checked, unchecked, strict=True))
    differences = statistics.quantiles([(one - other) * 1e6 for one, other in pairs], n=4)
    shares = statistics.quantiles([100 * (one / other - 1) for one, other in pairs], n=4)
    low, median, high = differences
    print(f"{processes} process(es): an update without checks takes {statistics.median(unchecked) * 1e6:.0f} µs")
    print(f"  the checks take {median:.1f} µs (quartiles {low:.1f} to {high:.1f})")
    print(f"  that is {shares[1]:.2f} % (quartiles {shares[0]:.2f} to {shares[2]:.2f})")
    return median <= ALLOWED_SECONDS * 1e6 if processes == 1 else shares[1] <= 100 * ALLOWED_SHARE


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=[1, 2], action="append", help="repeat; default both")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=40, help="per round, of four updates with the checks")
    options = parser.parse_args()
    met = [report(processes, options.rounds, options.turns) for processes in options.processes or (1, 2)]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
