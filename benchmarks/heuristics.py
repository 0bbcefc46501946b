"""Measure what each way to save time between ranks is worth: updates with it and without it, in turns.

    python benchmarks/heuristics.py                                   all rows, some 12 minutes on two cores
    python benchmarks/heuristics.py --network loopback --workload mlp --heuristic overlap
    python benchmarks/heuristics.py --others off                      each by itself, the others switched off

Two ranks with one device each train the workloads of `updates.py`, over the loopback and between two network
namespaces whose cable carries 10 and 1 Gbit/s (as root, see `networks.py`). For each row all variants are
started at once and take turns in short rounds. What is printed is the median over rounds of (seconds of an
update without) / (seconds with) in the same round, with the quartiles: above 1 the heuristic gains. It stays
on by default if it gains 5 % on one row and loses at most 2 % on every other.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lockstep.updaters.pace import Pacer
from networks import LOOPBACK, Side, cable, enter, measured_rate
from peers import Update, meet_at
from updates import WORKLOADS, Contender, free_port, take_turns
from updates import lockstep as updates_of
from workloads import Workload

from lockstep.updaters import over_ranks, overlap, riding

HEURISTICS = {
    "overlap": "gradients sent during backward",
    "riding": "small gradients inside of the control message",
    "pace": "shards cut over ranks by measured time",
}
NETWORKS: Mapping[str, float | None] = {"loopback": None, "10gbit": 10e9, "1gbit": 1e9}
"""By name: bits a second; None for no cable."""
GAIN = 0.05
LOSS = 0.02
ROUNDS = 20  # the fewest that a verdict is given by
WARM_UP = 40  # updates in which ranks measure each other, settle, and guess what comes


def switch_off(heuristic: str) -> None:
    """Have the updaters that this process makes from now on do without a heuristic; on all ranks alike."""
    if heuristic == "overlap":
        overlap.PATIENCE = 2**62  # type: ignore[misc]  # alike updates before the first that is guessed
    elif heuristic == "riding":
        riding.SMALL = 0  # type: ignore[misc]  # bytes that may travel with a message
    elif heuristic == "pace":
        over_ranks.Pacer = _unmoved  # type: ignore[assignment,misc]
    else:
        raise ValueError(f"`heuristic` must be one of {', '.join(HEURISTICS)}, got {heuristic!r}.")


def _unmoved(*, movable: bool, by_workloads: bool) -> Pacer:  # noqa: ARG001 - nothing may be moved
    return Pacer(movable=False, by_workloads=by_workloads)


def rank_of(
    workload: Workload, rank: int, port: int, *, sides: tuple[Side, Side], off: Sequence[str], num_shards: int
) -> Update:
    """One of two ranks, on its side of the network, with some heuristics switched off."""
    enter(sides[rank])
    meet_at(port, rank)
    machines = len({side.namespace for side in sides})
    os.environ.update(
        MASTER_ADDR=sides[0].address,
        GLOO_SOCKET_IFNAME=sides[rank].interface,
        LOCAL_RANK=str(rank if machines == 1 else 0),
        LOCAL_WORLD_SIZE=str(2 // machines),
        GROUP_RANK=str(rank if machines == 2 else 0),
        GROUP_WORLD_SIZE=str(machines),
    )
    for heuristic in off:
        switch_off(heuristic)
    return updates_of(workload, num_shards=num_shards, devices=1)


@contextmanager
def network(name: str) -> Iterator[tuple[Side, Side]]:
    """Make a network by its name."""
    rate = NETWORKS[name]
    if rate is None:
        yield LOOPBACK
        return
    with cable(rate) as sides:
        yield sides


class Row(NamedTuple):
    """What a heuristic came to on one network with one workload: ratios of time without to time with it."""

    network: str
    workload: str
    seconds: float
    low: float
    median: float
    high: float


def variants(heuristics: Sequence[str], *, others: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each heuristic, what is switched off with it and without it."""
    if others == "on":
        return {name: ([], [name]) for name in heuristics}
    return {name: ([each for each in HEURISTICS if each != name], list(HEURISTICS)) for name in heuristics}


def measure(
    sides: tuple[Side, Side], workload: str, pairs: Mapping[str, tuple[list[str], list[str]]], **options: Any
) -> dict[str, list[float]]:
    """Let all variants take turns; return the seconds of an update in each round, by what is switched off."""
    rounds, round_seconds = options.pop("rounds"), options.pop("round_seconds")
    contenders: dict[str, Contender] = {}
    try:
        for off in [off for pair in pairs.values() for off in pair]:
            if _key(off) not in contenders:
                shared: Any = {"port": free_port(), "sides": sides, "off": off, **options}
                contenders[_key(off)] = Contender(
                    workload, [(rank_of, {"rank": rank, **shared}) for rank in range(2)]
                )
        return take_turns(contenders, rounds, warm_up=WARM_UP, round_seconds=round_seconds)
    finally:
        for contender in contenders.values():
            contender.stop()


def _key(off: Sequence[str]) -> str:
    return "without " + ", ".join(off) if off else "with all"


def verdict(rows: Sequence[Row], *, rounds: int) -> str:
    """Apply the rule for what stays on by default."""
    best = max(rows, key=lambda row: row.median)
    worst = min(rows, key=lambda row: row.median)
    gains, losses = best.median - 1, 1 - worst.median
    stays = gains >= GAIN and losses <= LOSS
    text = (
        f"{'stays on' if stays else 'goes off'}: best {gains:+.1%} ({best.workload}, {best.network}; bar "
        f"{GAIN:+.0%}), worst {-losses:+.1%} ({worst.workload}, {worst.network}; bar {-LOSS:+.0%})"
    )
    missing = len(NETWORKS) * len(WORKLOADS) - len(rows)
    reasons = [f"{missing} rows were not measured"] if missing else []
    reasons += [f"{rounds} rounds are fewer than {ROUNDS}"] if rounds < ROUNDS else []
    return f"{text}\n  no verdict yet: {' and '.join(reasons)}" if reasons else text


def report(rows: Mapping[str, Sequence[Row]], *, rounds: int) -> None:
    """Print a table for each heuristic, and what follows from it."""
    for heuristic, measured in rows.items():
        print(f"\n{heuristic}: {HEURISTICS[heuristic]}")
        print(f"  {'network':10} {'workload':10} {'ms with':>9}  {'without / with':>14}  {'quartiles':>13}")
        for row in measured:
            print(
                f"  {row.network:10} {row.workload:10} {row.seconds * 1e3:9.2f}  {row.median:14.3f}"
                f"  {row.low:.3f} - {row.high:.3f}"
            )
        print(f"  {verdict(measured, rounds=rounds)}")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heuristic", action="append", choices=list(HEURISTICS), help="repeat; default all")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="repeat; default all")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeat; default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-seconds", type=float, default=0.25)
    parser.add_argument("--num-shards", type=int, default=4, help="of a batch, over both ranks")
    parser.add_argument("--others", choices=["on", "off"], default="on", help="the heuristics not measured")
    options = parser.parse_args()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # namespaces have no names of hosts, which torch tells
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # namespaces outlive who made them
    pairs = variants(options.heuristic or list(HEURISTICS), others=options.others)
    rows: dict[str, list[Row]] = {name: [] for name in pairs}
    for name in options.network or NETWORKS:
        with network(name) as sides:
            print(f"{name}: {measured_rate(sides) / 1e9:.2f} Gbit/s by one connection", flush=True)
            for workload in options.workload or WORKLOADS:
                seconds = measure(
                    sides,
                    workload,
                    pairs,
                    rounds=options.rounds,
                    round_seconds=options.round_seconds,
                    num_shards=options.num_shards,
                )
                for heuristic, (on, off) in pairs.items():
                    ratios = [a / b for a, b in zip(seconds[_key(off)], seconds[_key(on)], strict=True)]
                    low, median, high = statistics.quantiles(ratios, n=4)
                    mine = statistics.median(seconds[_key(on)])
                    rows[heuristic].append(Row(name, workload, mine, low, median, high))
                    print(f"  {workload:8} {heuristic:8} {median:.3f}", flush=True)
    report(rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
