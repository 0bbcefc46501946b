"""Measure what audited updates cost: updates with `audit_every=16` and without audits alternate in the same processes.

    python benchmarks/audits.py                          the MLP, convnet and encoder, in one process and in two
    python benchmarks/audits.py --workload mlp --processes 2 --rounds 60

Two updaters of eight shards train copies of a model, each for 16 updates in turn, so that one update in 16 of the first
one is audited. Printed are the medians over rounds of the ratios of their processor times, summed over the processes,
and of their times on the clock, with the quartiles. The target is at most 1.02 for the processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

import torch
from peers import set_environment
from torch.nn.functional import cross_entropy
from updates import ReadyBatches, free_port
from workloads import WORKLOADS

import lockstep as ls

EVERY: Final = 16


def updater_of(name: str, every: int) -> ls.ParallelUpdater:
    """Create an updater on one device."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.model()
    return ls.ParallelUpdater(
        ReadyBatches(workload.batches(slice(None))),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        devices=["cpu"],
        num_shards=8,
        loss_fn=ls.supervised(cross_entropy),
        audit_every=every,
    )


def serve(pipe: Connection, rank: int, port: int | None, name: str) -> None:
    """Run 16 updates of each updater as often as requested, and send their processor times and their times."""
    if port is not None:
        set_environment(port, rank)
    torch.set_num_threads(1)
    updaters = {every: updater_of(name, every) for every in (0, EVERY)}
    pipe.send(None)
    while pipe.recv():
        found: dict[int, tuple[float, float]] = {}
        for every, updater in updaters.items():
            begin = time.process_time(), time.perf_counter()
            for _ in range(EVERY):
                updater.update()
            found[every] = time.process_time() - begin[0], time.perf_counter() - begin[1]
        pipe.send(found)


def report(name: str, processes: int, rounds: int) -> None:
    """Measure one workload, and print the ratios."""
    context = get_context("spawn")
    port = free_port() if processes > 1 else None
    pipes = []
    for rank in range(processes):
        pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, rank, port, name), daemon=True).start()
        theirs.close()  # so that `recv` raises an error if the process ends
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    ratios: list[tuple[float, float]] = []
    for _ in range(1 + rounds):
        for pipe in pipes:
            pipe.send(True)
        ranks = [pipe.recv() for pipe in pipes]
        work = [sum(each[every][0] for each in ranks) for every in (EVERY, 0)]
        clock = [max(each[every][1] for each in ranks) for every in (EVERY, 0)]
        ratios.append((work[0] / work[1], clock[0] / clock[1]))
    for pipe in pipes:
        pipe.send(False)
    # Without the first round, in which the first updates of a run are audited.
    for what, values in zip(("processor time", "clock"), zip(*ratios[1:], strict=True), strict=True):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name}, {processes} process(es), {what}: {median:.3f} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", choices=list(WORKLOADS), action="append", help="repeat; default mlp, convnet, encoder"
    )
    parser.add_argument("--processes", type=int, choices=[1, 2], action="append", help="repeat; default both")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    for name in options.workload or ("mlp", "convnet", "encoder"):
        for processes in options.processes or (1, 2):
            report(name, processes, options.rounds)


if __name__ == "__main__":
    main()
