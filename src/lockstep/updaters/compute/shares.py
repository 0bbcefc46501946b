"""Decide which shards of an update the devices of this process compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import TypeAlias

from lockstep import plan
from lockstep.plan import Shard
from lockstep.tree import PartialSum, ShardSum


@dataclass(frozen=True, slots=True)
class RankShare:
    """The shards of an update that one process computes.

    Attributes:
        shards_by_device: The shards of each of its devices, in order.
        start: The first number past the shards of processes of lower rank. All shards from here up to `stop` belong to
            this process.
        stop: The first shard number of the processes of higher rank; without any, a number past all subtrees.
        num_shards: The number of shards over all processes.
        first_shard: The first shard over all processes.
        everywhere: The shards of each device of each process.
    """

    shards_by_device: list[list[Shard]]
    start: int
    stop: int
    num_shards: int
    first_shard: Shard
    everywhere: list[list[list[Shard]]]

    def merged(self, partials: Iterable[PartialSum]) -> list[PartialSum]:
        """Sum partial sums of this process, as far as that does not involve other processes.

        Args:
            partials: The partial sums in order of shards. Their tensors are added to in place.
        """
        # The limits keep subtrees open that contain shards of other ranks: adding them up here would change the bits.
        sums = ShardSum(self.start)
        for each in partials:
            sums.push(each.shard, each.tensors)
        sums.merge_complete(self.stop)
        return sums.partials


RankWorkloads: TypeAlias = tuple[tuple[float, ...], ...]
"""The workloads of the devices of each rank, by which shards are assigned to them."""


# Exact shares are slow to compute, and most batches have one of a few sizes. The arguments are therefore hashable.
@lru_cache(maxsize=64)
def share_of(
    workloads: RankWorkloads, rank: int, sizes: tuple[int, ...], num_shards: int | None, strided: bool
) -> RankShare:
    """Assign shards to all devices, and return those of this process.

    Args:
        workloads: The workloads of the devices of all processes.
        rank: The rank of this process.
        sizes: The number of samples in each batch of the update.
        num_shards: The number of shards per batch; None for one per device.
        strided: Whether samples are assigned to shards round robin.
    """
    runs = plan.shards_by_device(
        sizes, num_shards, [each for devices in workloads for each in devices], strided=strided
    )
    rest = iter(runs)
    ranks = [list(islice(rest, len(each))) for each in workloads]
    # The numbers between two processes' shards belong to missing shards. A subtree that reaches into them can be added
    # up here only if no shard of another process is in it, hence both limits.
    lower = [shard.index for run in chain(*ranks[:rank]) for shard in run]
    higher = [shard.index for run in chain(*ranks[rank + 1 :]) for shard in run]
    shards = [shard for run in runs for shard in run]
    return RankShare(
        shards_by_device=ranks[rank],
        start=1 + lower[-1] if lower else 0,
        stop=higher[0] if higher else 2 * (1 + shards[-1].index),
        num_shards=len(shards),
        first_shard=shards[0],
        everywhere=ranks,
    )
