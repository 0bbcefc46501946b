"""Compare updates per second: lockstep, plain loops, DDP, and the limit of two processes that do not communicate.

    python benchmarks/updates.py                      all four workloads, about five minutes on two cores
    python benchmarks/updates.py --workload mlp --rounds 10
    python benchmarks/updates.py --before ../checkout --contender "lockstep, S=2"     include another checkout

All contenders are started at once and take turns in short rounds, so that a drift of the machine's speed affects
all of them. Each gets the same model, the same prepared batches of 256 samples and the same `torch.optim.SGD` with
momentum. Hugging Face Accelerate and Lightning Fabric take part if they are installed. It prints, for each
contender, the median over rounds of (time of the limit) / (its time) in the same round: 1.00 is as fast as two
cores that never wait for each other.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from peers import Update, ddp, half, installed_peers, loop, set_environment
from torch.nn.functional import cross_entropy
from workloads import BATCH_SIZE, WORKLOADS, Workload

import lockstep as ls
from lockstep.data import Iterator

BEFORE = "before: "
ROUND_SECONDS = 0.25  # long compared with a switch between contenders, short compared with the drift of the machine


class ReadyBatches(Iterator):
    """An endless iterator over a few prepared batches, which the plain loops use too."""

    epoch = 0
    epoch_detail = 0.0
    previous_epoch_detail = None
    is_new_epoch = False

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches = batches
        self._position = 0

    def peek(self, ahead: int = 0) -> Any:
        """Return a batch of tensors."""
        return self._batches[(self._position + ahead) % len(self._batches)]

    def advance(self, num_batches: int = 1) -> None:
        """Advance past the next batches."""
        self._position += num_batches

    def reset(self) -> None:
        """Return to the first batch."""
        self._position = 0

    def finalize(self) -> None:
        """Release nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position."""
        self._position = state_dict["position"]


def lockstep(
    workload: Workload, *, num_shards: int, devices: int = 2, workloads: Literal["auto"] | None = None
) -> Update:
    """Return the update of a ParallelUpdater with one intra-op thread per device, as in a trainer's run."""
    torch.set_num_threads(1)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    updater = ls.ParallelUpdater(
        ReadyBatches(workload.batches(slice(None))),
        optimizer,
        model,
        devices=["cpu"] * devices,
        num_shards=num_shards,
        workloads=workloads,
        loss_fn=ls.supervised(cross_entropy),
    )

    def update(step: int) -> None:  # noqa: ARG001 - the iterator knows which batch comes next
        updater.update()

    return update


def lockstep_rank(workload: Workload, rank: int, port: int, *, num_shards: int) -> Update:
    """Return the update of one of two processes with a ParallelUpdater over gloo, with one device each."""
    set_environment(port, rank)
    return lockstep(workload, num_shards=num_shards, devices=1)


PEERS = installed_peers()
CONNECTED = (ddp, lockstep_rank, *PEERS.values())
"""The contenders whose processes are connected, and need a port."""

CONTENDERS: Mapping[str, list[tuple[Callable[..., Update], dict[str, int]]]] = {
    "limit": [(half, {"rank": 0}), (half, {"rank": 1})],
    "loop, 1 thread": [(loop, {"threads": 1})],
    "loop, 2 threads": [(loop, {"threads": 2})],
    "DDP, 2 processes": [(ddp, {"rank": 0}), (ddp, {"rank": 1})],
    **{f"{name}, 2 processes": [(peer, {"rank": rank}) for rank in range(2)] for name, peer in PEERS.items()},
    "lockstep, S=2": [(lockstep, {"num_shards": 2})],
    "lockstep, S=8": [(lockstep, {"num_shards": 8})],
    "lockstep, 2 processes": [(lockstep_rank, {"rank": rank, "num_shards": 2}) for rank in range(2)],
    "lockstep, 2 processes, S=8": [(lockstep_rank, {"rank": rank, "num_shards": 8}) for rank in range(2)],
    "lockstep, 1 device": [(lockstep, {"num_shards": 1, "devices": 1})],
}


def serve(pipe: Connection, name: str, build: Callable[..., Update], options: dict[str, int]) -> None:
    """Run as many updates as requested, again and again, and send the time that they took."""
    torch.manual_seed(0)
    update = build(WORKLOADS[name], **options)
    step = 0
    pipe.send(0.0)
    while (count := pipe.recv()) > 0:
        begin = time.perf_counter()
        for _ in range(count):
            update(step)
            step += 1
        pipe.send(time.perf_counter() - begin)


class Contender:
    """One or two processes that take a turn together."""

    def __init__(
        self, workload: str, parts: list[tuple[Callable[..., Update], dict[str, int]]], checkout: Path | None = None
    ) -> None:
        context = get_context("spawn")
        path = [*sys.path]
        if checkout is not None:
            sys.path.insert(0, str(checkout / "src"))  # a spawned process inherits the path of its parent
        port = {"port": free_port()} if parts[0][0] in CONNECTED else {}
        self._pipes, self._processes = [], []
        for build, options in parts:
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, workload, build, {**options, **port}), daemon=True)
            process.start()
            theirs.close()  # so that `recv` raises an error if the process ends
            self._pipes.append(pipe)
            self._processes.append(process)
        sys.path[:] = path
        # Wait until every process is ready, so that none starts during another's turn.
        for pipe in self._pipes:
            pipe.recv()

    def seconds(self, count: int) -> float:
        """Run some updates and return the seconds per update, by the slower process."""
        for pipe in self._pipes:
            pipe.send(count)
        return max([pipe.recv() for pipe in self._pipes]) / count

    def stop(self) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join(10)
            process.kill()


def phases(pipe: Connection, name: str, num_shards: int, devices: int) -> None:
    """Send the median times of the phases of an update, in seconds."""
    from lockstep.updaters.step.engine import GradientEngine  # noqa: PLC0415 - another checkout may lack these modules
    from lockstep.updaters.step.optimizer_step import OptimizerStep  # noqa: PLC0415 - see above

    timed_methods = (
        (GradientEngine, "compute", "forward and backward of the shards"),
        (GradientEngine, "reduce", "reduce and check"),
        (OptimizerStep, "step", "optimizer"),
        (ls.ParallelUpdater, "update", "whole update"),
    )
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {label: [] for _, _, label in timed_methods}
    # Replaced for good, in a process that ends after this.
    for owner, method, label in timed_methods:
        setattr(owner, method, timed(getattr(owner, method), seconds[label]))
    update = lockstep(WORKLOADS[name], num_shards=num_shards, devices=devices)
    begin = time.perf_counter()
    step = 0
    while step < 10 or time.perf_counter() - begin < 8 * ROUND_SECONDS:
        update(step)
        step += 1
    pipe.send({label: statistics.median(values) for label, values in seconds.items()})


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a method that appends the time of each call to a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def explain(workload: str, *, num_shards: int, devices: int) -> None:
    """Print where the time of an update is spent."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=phases, args=(theirs, workload, num_shards, devices))
    process.start()
    medians = pipe.recv()
    process.join()
    whole = medians.pop("whole update")
    medians["batch, plan, streams, counting"] = whole - sum(medians.values())
    shares = ", ".join(f"{label} {value * 1e6:.0f} µs" for label, value in medians.items())
    print(f"    the {whole * 1e6:.0f} µs of an update on {devices} devices, S={num_shards}: {shares}")


def free_port() -> int:
    """Find an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(workload: str, names: list[str], rounds: int, before: Path | None = None) -> dict[str, list[float]]:
    """Run the contenders in turns, and return the seconds per update in each round."""
    contenders = {name: Contender(workload, CONTENDERS[name]) for name in names}
    if before is not None:
        ours = [name for name in names if name.startswith("lockstep")]
        contenders |= {f"{BEFORE}{name}": Contender(workload, CONTENDERS[name], before) for name in ours}
    seconds = take_turns(contenders, rounds)
    for contender in contenders.values():
        contender.stop()
    return seconds


def take_turns(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    warm_up: int = 3,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, list[float]]:
    """Return the seconds per update of each contender in each round; each in turn is the first of a round."""
    names = list(contenders)
    counts = {}
    for name, contender in contenders.items():
        contender.seconds(warm_up)
        # As many updates per turn as take about the same time for every contender.
        counts[name] = max(1, round(round_seconds / contender.seconds(5)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        # Rotated, so that no contender always has the same position in a round.
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            seconds[name].append(contenders[name].seconds(counts[name]))
    return seconds


def report(workload: str, seconds: dict[str, list[float]]) -> bool:
    """Print a table and the missed targets; return whether all targets were met."""
    limit = seconds["limit"]
    print(f"\n{workload}: one update of the limit takes {statistics.median(limit) * 1e3:.2f} ms")
    ratios = {}
    for name, values in seconds.items():
        pairs = [a / b for a, b in zip(limit, values, strict=True)]
        ratios[name] = statistics.median(pairs)
        low, high = min(values) * 1e3, statistics.median(values) * 1e3
        print(f"  {name:34} {ratios[name]:5.2f} of the limit   {high:8.2f} ms median {low:8.2f} ms least")
    for name, values in seconds.items():
        if name.startswith(BEFORE):
            now = seconds[name.removeprefix(BEFORE)]
            gain = statistics.median(a / b for a, b in zip(values, now, strict=True))
            print(f"  {name.removeprefix(BEFORE)}: {gain:.2f} times as fast as before")
    misses = check(ratios, seconds)
    if any("S=2" in miss for miss in misses):
        explain(workload, num_shards=2, devices=2)
    if any("one device" in miss for miss in misses):
        explain(workload, num_shards=1, devices=1)
    return not misses


def check(ratios: dict[str, float], seconds: dict[str, list[float]]) -> list[str]:
    """Compare the figures with the targets; print and return those that were missed."""
    misses = []
    peers = {name: ratio for name, ratio in ratios.items() if name.startswith(("loop", "DDP", *PEERS))}
    ours = ratios.get("lockstep, S=2")
    if ours is not None and peers:
        best = max(peers, key=lambda name: peers[name])
        # The fixed cost of an update weighs less in a longer one.
        bar = 0.95 if statistics.median(seconds["limit"]) >= 0.02 else 0.8
        if ours < bar:
            misses.append(f"S=2 reaches {ours:.2f} of the limit, target {bar}")
        if ours <= peers[best]:
            misses.append(f"S=2 ({ours:.2f}) is not faster than {best} ({peers[best]:.2f})")
    if "lockstep, 1 device" in seconds and "loop, 1 thread" in seconds:
        pairs = zip(seconds["lockstep, 1 device"], seconds["loop, 1 thread"], strict=True)
        over = statistics.median(one - plain for one, plain in pairs)
        allowed = 50e-6 + 0.02 * statistics.median(seconds["loop, 1 thread"])
        print(f"  one device: {over * 1e6:.0f} µs per update more than the plain loop (target {allowed * 1e6:.0f})")
        if over > allowed:
            misses.append(f"one device: {over * 1e6:.0f} µs more than the plain loop, target {allowed * 1e6:.0f}")
    for miss in misses:
        print(f"  MISSED: {miss}")
    return misses


def main() -> None:
    """Parse the options and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="repeat; default all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, batch {BATCH_SIZE}, {options.rounds} rounds")
    names = ["limit", *(name for name in options.contender or CONTENDERS if name != "limit")]
    workloads = list(WORKLOADS) if options.workload == "all" else [options.workload]
    good = [report(name, compare(name, names, options.rounds, options.before)) for name in workloads]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
