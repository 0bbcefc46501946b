"""Measure what each way to save time between ranks is worth: updates with it and without it, in turns.

    python benchmarks/heuristics.py                                   all rows, some 12 minutes on two cores
    python benchmarks/heuristics.py --network loopback --workload mlp --heuristic early
    python benchmarks/heuristics.py --others off                      each by itself, the others switched off

Two ranks with one device each train the workloads of `updates.py`, over the loopback and between two network
namespaces whose cable carries 10 and 1 Gbit/s (as root, see `networks.py`). For each row all variants are
started at once and take turns in short rounds. What is printed is the median over rounds of (seconds of an
update without) / (seconds with) in the same round, with the quartiles: above 1 the heuristic gains. It is on
by default if it gains 5 % on one row and loses at most 2 % on every other. Measured speeds (`auto`) are used
where a user asks for them by ``workloads="auto"``; two equal ranks, as here, pay for them and gain nothing.
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

from networks import LOOPBACK, Side, cable, enter, measured_rate
from peers import Update, meet_at
from updates import WORKLOADS, Contender, free_port, lockstep as updates_of, take_turns
from workloads import Workload

from lockstep.updaters.ranks import rank_sum
from lockstep.updaters.ranks.rank_sum import Heuristics

HEURISTICS = {
    "early": "gradients sent during backward",
    "inline": "small gradients inside of the control message",
    "auto": "shards cut over ranks by measured time",
}
FREE = ("early", "inline")
"""Those that may be on by default: `auto` is asked for by the user."""
NETWORKS: Mapping[str, float | None] = {"loopback": None, "10gbit": 10e9, "1gbit": 1e9}
"""By name: bits a second; None for no cable."""
GAIN = 0.05
LOSS = 0.02
ROUNDS = 20  # the fewest that a verdict is given by
WARM_UP = 40  # updates in which ranks measure each other, adopt that, and predict what comes


def rank_of(
    workload: Workload, rank: int, port: int, *, sides: tuple[Side, Side], on: Sequence[str], num_shards: int
) -> Update:
    """One of two ranks, on its side of the network, with some heuristics."""
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
    # For the updaters that this process makes from now on.
    rank_sum.DEFAULTS = Heuristics(early_sending="early" in on, inline_gradients="inline" in on)  # type: ignore[misc]
    return updates_of(workload, num_shards=num_shards, devices=1, workloads="auto" if "auto" in on else None)


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
    """Return, for each heuristic, what is on with it and without it."""
    rest = {name: [each for each in FREE if each != name and others == "on"] for name in heuristics}
    return {name: (sorted([*rest[name], name]), rest[name]) for name in heuristics}


def measure(
    sides: tuple[Side, Side], workload: str, pairs: Mapping[str, tuple[list[str], list[str]]], **options: Any
) -> dict[str, list[float]]:
    """Let all variants take turns; return the seconds of an update in each round, by what is on."""
    rounds, round_seconds = options.pop("rounds"), options.pop("round_seconds")
    contenders: dict[str, Contender] = {}
    try:
        for on in [on for pair in pairs.values() for on in pair]:
            if _key(on) not in contenders:
                shared: Any = {"port": free_port(), "sides": sides, "on": on, **options}
                contenders[_key(on)] = Contender(workload, [(rank_of, {"rank": rank, **shared}) for rank in range(2)])
        return take_turns(contenders, rounds, warm_up=WARM_UP, round_seconds=round_seconds)
    finally:
        for contender in contenders.values():
            contender.stop()


def _key(on: Sequence[str]) -> str:
    return "with " + ", ".join(on) if on else "plain"


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
        if heuristic in FREE:
            print(f"  {verdict(measured, rounds=rounds)}")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heuristic", action="append", choices=list(HEURISTICS), help="repeat; default all")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="repeat; default all")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeat; default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-seconds", type=float, default=0.25)
    parser.add_argument("--num-shards", type=int, default=4, help="of a batch, over both ranks")
    parser.add_argument("--others", choices=["on", "off"], default="on", help="the heuristics not measured")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no names of hosts, which torch tells
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # namespaces outlive who made them
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
                for heuristic, (on, without) in pairs.items():
                    ratios = [a / b for a, b in zip(seconds[_key(without)], seconds[_key(on)], strict=True)]
                    low, median, high = statistics.quantiles(ratios, n=4)
                    mine = statistics.median(seconds[_key(on)])
                    rows[heuristic].append(Row(name, workload, mine, low, median, high))
                    print(f"  {workload:8} {heuristic:8} {median:.3f}", flush=True)
    report(rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
