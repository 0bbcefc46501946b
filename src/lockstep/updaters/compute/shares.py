"""Decide which shards of an update the devices of this process compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import TypeAlias

from lockstep import plan
from lockstep.plan import Shard
from lockstep.updaters.compute.speeds import RankSpeeds


@dataclass(frozen=True, slots=True)
class RankShare:
    """The shards of an update that one process computes.

    Attributes:
        runs: The shards of each of its devices, in order.
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


Workloads: TypeAlias = tuple[tuple[float, ...], ...]
"""Those of the devices of some ranks."""

Runs: TypeAlias = list[list[Shard]]
"""The shards of each device of one rank."""


@dataclass(frozen=True, slots=True)
class ShardAssignment:
    """Assigns shards to the devices of all processes by their workloads.

    Attributes:
        before: Those of each process of lower rank.
        after: Those of each process of higher rank.
        speeds: How long processes take; None as long as nobody knows, or where shards are not to be moved.
    """

    before: Workloads = ()
    after: Workloads = ()
    speeds: RankSpeeds | None = None

    def num_places(self, mine: int) -> int:
        """Count the devices of all processes, of which so many are this one's."""
        return mine + sum(map(len, (*self.before, *self.after)))


@lru_cache(maxsize=64)  # exact shares are slow to compute, and batches are mostly of one size
def share_of(
    assignment: ShardAssignment,
    sizes: tuple[int, ...],
    num_shards: int | None,
    mine: tuple[float, ...],
    strided: bool,
) -> RankShare:
    """Assign shards to all devices, and return those of this process.

    Args:
        assignment: The workloads of the other processes.
        sizes: The sizes of the batches of one update.
        num_shards: Shards per batch; None for one per device.
        mine: The workloads of this process's devices.
        strided: Whether samples are dealt round robin.
    """
    workloads = (*assignment.before, mine, *assignment.after)
    rank, speeds = len(assignment.before), assignment.speeds
    runs = plan.shards_by_device(sizes, num_shards, [each for rank in workloads for each in rank], strided=strided)
    rest = iter(runs)
    ranks = [list(islice(rest, len(each))) for each in workloads]
    if speeds is not None and num_shards is not None:
        ranks = _rebalanced(ranks, workloads, speeds)
    earlier = [shard.index for run in chain(*ranks[:rank]) for shard in run]
    later = [shard.index for run in chain(*ranks[rank + 1 :]) for shard in run]
    shards = [shard for run in runs for shard in run]
    return RankShare(
        runs=ranks[rank],
        first=1 + earlier[-1] if earlier else 0,
        stop=later[0] if later else 2 * (1 + shards[-1].index),
        num_shards=len(shards),
        opening=shards[0],
    )


def _rebalanced(ranks: Sequence[Runs], workloads: Workloads, speeds: RankSpeeds) -> list[Runs]:
    """Cut over ranks by their speeds, then over the devices of each by their workloads."""
    shards = [shard for runs in ranks for run in runs for shard in run]
    stops = list(accumulate(sum(map(len, runs)) for runs in ranks))
    usual = [range(start, stop) for start, stop in pairwise([0, *stops])]
    cuts = speeds.cut([shard.index for shard in shards], usual, workloads)
    if cuts == usual:
        return list(ranks)
    return [_dealt(shards[run.start : run.stop], each) for run, each in zip(cuts, workloads, strict=True)]


def _dealt(shards: Sequence[Shard], workloads: Sequence[float]) -> Runs:
    """Deal the shards of one rank out to its devices."""
    if not shards:
        return [[] for _ in workloads]
    return [list(shards[run.start : run.stop]) for run in plan.assign(len(shards), workloads)]
