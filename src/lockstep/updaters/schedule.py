"""Say which shards of an update the places of this process compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import TypeAlias

from lockstep import plan
from lockstep.plan import Shard
from lockstep.updaters.pace import Pace


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an update that one process computes.

    Attributes:
        runs: The shards of each of its places, in order.
        first: A shard number from which on all shards up to `stop` are its own; of what comes before, none.
        stop: The number from which on shards belong to others; where there are none, one past all subtrees.
        num_shards: How many shards there are on all processes.
        opening: The first of these.
    """

    runs: list[list[Shard]]
    first: int
    stop: int
    num_shards: int
    opening: Shard


Speeds: TypeAlias = tuple[tuple[float, ...], ...]
"""The workloads of the places of some ranks."""

Runs: TypeAlias = list[list[Shard]]
"""The shards of each place of one rank."""


@dataclass(frozen=True, slots=True)
class Everywhere:
    """The places of all processes, by their workloads.

    Attributes:
        before: Those of each process of lower rank.
        after: Those of each process of higher rank.
        pace: How long processes take; None as long as nobody knows, or where shards are not to be moved.
    """

    before: Speeds = ()
    after: Speeds = ()
    pace: Pace | None = None

    def part(
        self, sizes: Sequence[int], num_shards: int | None, mine: Sequence[float], *, strided: bool
    ) -> Part:
        """Give shards to all places, and say which are this process's.

        Args:
            sizes: Of the batches of one update.
            num_shards: Shards a batch; None for one a place.
            mine: The workloads of this process's places.
            strided: Whether samples are dealt round robin.
        """
        return _part(self, tuple(sizes), num_shards, tuple(mine), strided)

    def num_places(self, mine: int) -> int:
        """Count the places of all processes, of which so many are this one's."""
        return mine + sum(map(len, (*self.before, *self.after)))


@lru_cache(maxsize=64)
def _part(
    everywhere: Everywhere,
    sizes: tuple[int, ...],
    num_shards: int | None,
    mine: tuple[float, ...],
    strided: bool,
) -> Part:
    """Remember the last schedules: exact shares are slow to compute, and batches are mostly of one size."""
    speeds = (*everywhere.before, mine, *everywhere.after)
    rank, pace = len(everywhere.before), everywhere.pace
    places = plan.schedule(sizes, num_shards, [each for rank in speeds for each in rank], strided=strided)
    ranks = _by_rank(places, speeds)
    if pace is not None and num_shards is not None:
        ranks = _paced(ranks, speeds, pace)
    earlier = [shard.index for run in chain(*ranks[:rank]) for shard in run]
    later = [shard.index for run in chain(*ranks[rank + 1 :]) for shard in run]
    shards = [shard for run in places for shard in run]
    return Part(
        runs=ranks[rank],
        first=1 + earlier[-1] if earlier else 0,
        stop=later[0] if later else 2 * (1 + shards[-1].index),
        num_shards=len(shards),
        opening=shards[0],
    )


def _by_rank(places: Runs, speeds: Speeds) -> list[Runs]:
    """Put together the places of each rank."""
    rest = iter(places)
    return [list(islice(rest, len(each))) for each in speeds]


def _paced(ranks: Sequence[Runs], speeds: Speeds, pace: Pace) -> list[Runs]:
    """Cut over ranks by their pace, then over the places of each by their workloads."""
    shards = [shard for runs in ranks for run in runs for shard in run]
    stops = list(accumulate(sum(map(len, runs)) for runs in ranks))
    usual = [range(start, stop) for start, stop in pairwise([0, *stops])]
    cuts = pace.cut([shard.index for shard in shards], usual, speeds)
    if cuts == usual:
        return list(ranks)
    return [_given_out(shards[run.start : run.stop], each) for run, each in zip(cuts, speeds, strict=True)]


def _given_out(shards: Sequence[Shard], speeds: Sequence[float]) -> Runs:
    """Give the shards of one rank to its places."""
    if not shards:
        return [[] for _ in speeds]
    return [list(shards[run.start : run.stop]) for run in plan.assign(len(shards), speeds)]
