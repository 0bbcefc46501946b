"""Say which shards of an update the places of this process compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep import plan
from lockstep.plan import Shard


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


@dataclass(frozen=True, slots=True)
class Everywhere:
    """The places of all processes, by their workloads.

    Attributes:
        before: Those of the processes of lower rank.
        after: Those of the processes of higher rank.
    """

    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()

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
        workloads = (*self.before, *mine, *self.after)
        own = len(self.before), len(self.before) + len(mine)
        return _part(tuple(sizes), num_shards, workloads, strided, own)

    def num_places(self, mine: int) -> int:
        """Count the places of all processes, of which so many are this one's."""
        return len(self.before) + mine + len(self.after)


@lru_cache(maxsize=64)
def _part(
    sizes: tuple[int, ...],
    num_shards: int | None,
    workloads: tuple[float, ...],
    strided: bool,
    own: tuple[int, int],
) -> Part:
    """Remember the last schedules: exact shares are slow to compute, and batches are mostly of one size."""
    runs = plan.schedule(sizes, num_shards, workloads, strided=strided)
    start, stop = own
    earlier = [shard.index for run in runs[:start] for shard in run]
    later = [shard.index for run in runs[stop:] for shard in run]
    shards = [shard for run in runs for shard in run]
    return Part(
        runs=runs[start:stop],
        first=1 + earlier[-1] if earlier else 0,
        stop=later[0] if later else 2 * (1 + shards[-1].index),
        num_shards=len(shards),
        opening=shards[0],
    )
