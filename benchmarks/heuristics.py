"""Measure what each optimization of the communication gains: updates with it and without it take turns.

    python benchmarks/heuristics.py                                   all rows, about 12 minutes on two cores
    python benchmarks/heuristics.py --network loopback --workload mlp --heuristic early
    python benchmarks/heuristics.py --others off                      each alone, with the others disabled

Two ranks with one device each train the workloads of `updates.py`, over the loopback and between two network
namespaces that are connected with 10 and 1 Gbit/s (as root, see `networks.py`). For each row all variants are
started at once and take turns in short rounds. It prints the median over rounds of (seconds per update without) /
(seconds per update with) in the same round, with the quartiles; a ratio above 1 is a gain. A heuristic is enabled
by default if it gains 5 % on one row and loses at most 2 % on every other. Measured speeds (`auto`) are used only
with ``workloads="auto"``; for two equal ranks, as here, they have a cost and no gain.
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
from peers import Update, set_environment
from updates import WORKLOADS, Contender, free_port, lockstep as updates_of, take_turns
from workloads import Workload

from lockstep.updaters.ranks import rank_sum
from lockstep.updaters.ranks.rank_sum import Heuristics

HEURISTICS = {
    "early": "gradients sent during backward",
    "inline": "small gradients inside the control message",
    "auto": "shards split over ranks by measured time",
}
DEFAULT_CANDIDATES = ("early", "inline")
"""The heuristics that may be enabled by default; `auto` is enabled by the user."""
NETWORKS: Mapping[str, float | None] = {"loopback": None, "10gbit": 10e9, "1gbit": 1e9}
"""The bandwidths in bits per second by name; None for the loopback."""
REQUIRED_GAIN = 0.05
ALLOWED_LOSS = 0.02
ROUNDS = 20  # the smallest number for a verdict
WARM_UP_UPDATES = 40  # in which ranks measure each other, adopt the measurements, and learn to predict


def rank_of(
    workload: Workload, rank: int, port: int, *, sides: tuple[Side, Side], on: Sequence[str], num_shards: int
) -> Update:
    """Return the update of one of two ranks, on its side of the network, with some heuristics enabled."""
    enter(sides[rank])
    set_environment(port, rank)
    # The variables that torchrun sets: one machine with two ranks, or two machines with one each.
    machines = len({side.namespace for side in sides})
    os.environ.update(
        MASTER_ADDR=sides[0].address,
        GLOO_SOCKET_IFNAME=sides[rank].interface,
        LOCAL_RANK=str(rank if machines == 1 else 0),
        LOCAL_WORLD_SIZE=str(2 // machines),
        GROUP_RANK=str(rank if machines == 2 else 0),
        GROUP_WORLD_SIZE=str(machines),
    )
    # For the updaters that this process creates from now on.
    rank_sum.DEFAULTS = Heuristics(early_sending="early" in on, inline_gradients="inline" in on)  # type: ignore[misc]
    return updates_of(workload, num_shards=num_shards, devices=1, workloads="auto" if "auto" in on else None)


@contextmanager
def network(name: str) -> Iterator[tuple[Side, Side]]:
    """Create a network by its name."""
    rate = NETWORKS[name]
    if rate is None:
        yield LOOPBACK
        return
    with cable(rate) as sides:
        yield sides


class Row(NamedTuple):
    """The result for a heuristic with one network and one workload: ratios of the time without it to that with it."""

    network: str
    workload: str
    seconds: float
    low: float
    median: float
    high: float


def variants(heuristics: Sequence[str], *, others: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each heuristic, the heuristics that are enabled with it and without it."""
    rest = {name: [each for each in DEFAULT_CANDIDATES if each != name and others == "on"] for name in heuristics}
    return {name: (sorted([*rest[name], name]), rest[name]) for name in heuristics}


def measure(
    sides: tuple[Side, Side], workload: str, pairs: Mapping[str, tuple[list[str], list[str]]], **options: Any
) -> dict[str, list[float]]:
    """Run all variants in turns, and return the seconds per update in each round, by the enabled heuristics."""
    rounds, round_seconds = options.pop("rounds"), options.pop("round_seconds")
    contenders: dict[str, Contender] = {}
    try:
        for on in [on for pair in pairs.values() for on in pair]:
            # Several heuristics have the variant without any in common.
            if _key(on) not in contenders:
                shared: Any = {"port": free_port(), "sides": sides, "on": on, **options}
                contenders[_key(on)] = Contender(workload, [(rank_of, {"rank": rank, **shared}) for rank in range(2)])
        return take_turns(contenders, rounds, warm_up=WARM_UP_UPDATES, round_seconds=round_seconds)
    finally:
        for contender in contenders.values():
            contender.stop()


def _key(on: Sequence[str]) -> str:
    """Return the name of a variant."""
    return "with " + ", ".join(on) if on else "plain"


def verdict(rows: Sequence[Row], *, rounds: int) -> str:
    """Apply the rule for what is enabled by default."""
    best = max(rows, key=lambda row: row.median)
    worst = min(rows, key=lambda row: row.median)
    gains, losses = best.median - 1, 1 - worst.median
    stays = gains >= REQUIRED_GAIN and losses <= ALLOWED_LOSS
    text = (
        f"{'enabled' if stays else 'disabled'} by default: "
        f"best {gains:+.1%} ({best.workload}, {best.network}; required {REQUIRED_GAIN:+.0%}), "
        f"worst {-losses:+.1%} ({worst.workload}, {worst.network}; allowed {-ALLOWED_LOSS:+.0%})"
    )
    missing = len(NETWORKS) * len(WORKLOADS) - len(rows)
    reasons = [f"{missing} rows were not measured"] if missing else []
    reasons += [f"{rounds} rounds are fewer than {ROUNDS}"] if rounds < ROUNDS else []
    return f"{text}\n  no verdict yet: {' and '.join(reasons)}" if reasons else text


def report(rows: Mapping[str, Sequence[Row]], *, rounds: int) -> None:
    """Print a table for each heuristic, and the verdict."""
    for heuristic, measured in rows.items():
        print(f"\n{heuristic}: {HEURISTICS[heuristic]}")
        print(f"  {'network':10} {'workload':10} {'ms with':>9}  {'without / with':>14}  {'quartiles':>13}")
        for row in measured:
            print(
                f"  {row.network:10} {row.workload:10} {row.seconds * 1e3:9.2f}  {row.median:14.3f}"
                f"  {row.low:.3f} - {row.high:.3f}"
            )
        if heuristic in DEFAULT_CANDIDATES:
            print(f"  {verdict(measured, rounds=rounds)}")


def main() -> None:
    """Parse the options and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heuristic", action="append", choices=list(HEURISTICS), help="repeat; default all")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="repeat; default all")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeat; default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-seconds", type=float, default=0.25)
    parser.add_argument("--num-shards", type=int, default=4, help="per batch, over both ranks")
    parser.add_argument("--others", choices=["on", "off"], default="on", help="the heuristics not measured")
    options = parser.parse_args()
    # torch warns that the namespaces have no host names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Without a handler, SIGTERM would end the process and leave the namespaces behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    pairs = variants(options.heuristic or list(HEURISTICS), others=options.others)
    rows: dict[str, list[Row]] = {name: [] for name in pairs}
    for name in options.network or NETWORKS:
        with network(name) as sides:
            print(f"{name}: {measured_rate(sides) / 1e9:.2f} Gbit/s over one connection", flush=True)
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
