"""Choose where the shards of a batch are cut over ranks: even work against few partial sums to send.

A cut does not change the result, because the sum follows a tree over shards and not over ranks. It does change how much
is sent: a rank whose shards form one subtree sends one partial sum, and any other contiguous run of shards sends
several.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from lockstep.plan import assign, check_workloads
from lockstep.tree import ShardSum


class _Path(NamedTuple):
    """The best assignment of shards to the first ranks; paths are compared by their first two fields.

    Attributes:
        longest: The number of seconds that the slowest of these ranks works.
        idle: The number of these ranks that have no shard.
        stops: Zero, followed by the position at which the shards of each of these ranks end.
    """

    longest: float
    idle: int
    stops: tuple[int, ...]


def cut_over_ranks(
    leaves: Sequence[int],
    seconds: Sequence[float],
    transfer: float,
    workloads: Sequence[Sequence[float]] | None = None,
) -> list[range]:
    """Choose a contiguous run of shards for each rank that minimizes the time of computing and of summing over ranks.

    The time of an update is the time of the slowest rank's shards plus the time of its transfers: with W ranks, of
    which the one with the most partial sums has n, every element is sent n·(W-1)/W times to the owners and (W-1)/W
    times back. Among cuts with equally fast ranks, the one that leaves the fewest ranks without shards is chosen.
    The candidates are the cuts of `plan.assign`, and cuts that differ from an even one by one shard or lie at a nearby
    multiple of a power of two.

    Args:
        leaves: The numbers of the existing shards in the tree, in ascending order.
        seconds: The time that each rank takes for one shard while all of its devices work. Only its ratio to `transfer`
            matters.
        transfer: The time it takes to send all gradients of the model once from one rank to another; at least 0.
        workloads: The relative speeds of the devices of each rank. By default every rank has one device.

    Returns:
        The shards of each rank, as positions in `leaves`. A rank may have none.

    Raises:
        ValueError: If there is no shard or no rank, or if a time is out of range.

    Determinism: ranks that pass the same numbers choose the same cuts.

    >>> cut_over_ranks(range(8), [1.0, 1.0, 1.0], transfer=0.1)
    [range(0, 3), range(3, 6), range(6, 8)]
    >>> cut_over_ranks(range(8), [1.0, 1.0, 1.0], transfer=10.0)
    [range(0, 2), range(2, 4), range(4, 8)]
    """
    check_workloads(seconds)
    if transfer < 0:
        raise ValueError(f"`transfer` must be at least 0, got {transfer}.")
    # The search starts from the even cut, so its result is never slower than not searching at all.
    even = assign(len(leaves), [1.0 / each for each in seconds])
    nodes, work = _node_counter(leaves), _work_time(seconds, workloads)
    reach = 2 * max(map(len, even))
    candidates = [_candidate_stops(run.stop, leaves, reach) for run in even]
    most = reach.bit_length()
    found = [even]
    # The transfer time depends on the rank with the most partial sums. For each possible maximum, the fastest cut that
    # respects it is found; the transfer time then decides between these.
    for limit in range(1, most + 1):
        path = _best_path(candidates, work, nodes, limit)
        if path is not None:
            found.append([range(*ends) for ends in pairwise(path.stops)])
    # `min` keeps the first of equals. All ranks build the same list, so all choose the same entry without a message.
    return min(found, key=lambda runs: _update_seconds(runs, work, nodes, transfer))


def _candidate_stops(stop: int, leaves: Sequence[int], reach: int) -> list[int]:
    """List candidate positions of a cut: the even one, its neighbours, and nearby ends of subtrees."""
    # Cuts at either end, of the last rank and of ranks without shards, stay where they are.
    if stop in (0, len(leaves)):
        return [stop]
    # Shards may be missing from the tree, so subtree ends are computed from leaf numbers and then looked up.
    leaf = leaves[stop]
    wanted = {leaf}
    for height in range(1, reach.bit_length() + 1):
        below = leaf >> height << height
        wanted |= {below, below + (1 << height)}
    near = {bisect_left(leaves, each) for each in wanted}
    return sorted(near | {stop - 1, stop + 1})


def _node_counter(leaves: Sequence[int]) -> Callable[[int, int], int]:
    """Return a function that counts the partial sums a run of shards adds up to."""

    @cache
    def nodes(start: int, stop: int) -> int:
        if start == stop:
            return 0
        shard_sum = ShardSum(first=leaves[start])
        for leaf in leaves[start:stop]:
            shard_sum.push(leaf, [])
        # This is what the rank itself does with its last partial sums, so the count is the number it will send.
        shard_sum.merge_complete(leaves[stop] if stop < len(leaves) else 1 << leaves[-1].bit_length())
        return len(shard_sum.partials)

    return nodes


def equivalent_shards(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Count the shards that all devices could compute in the time that the slowest takes for its own.

    Args:
        counts: The number of shards of each device.
        speeds: The relative speed of each device.

    >>> equivalent_shards([2, 1], [1.0, 1.0]), equivalent_shards([2, 1], [2.0, 1.0])
    (4.0, 3.0)
    """
    return max(count / speed for count, speed in zip(counts, speeds, strict=True)) * fsum(speeds)


def _work_time(seconds: Sequence[float], workloads: Sequence[Sequence[float]] | None) -> Callable[[int, int], float]:
    """Return a function that estimates the time a rank takes for a number of shards."""

    @cache
    def work(rank: int, count: int) -> float:
        if count and workloads is not None:
            counts = [len(run) for run in assign(count, workloads[rank])]
            return equivalent_shards(counts, workloads[rank]) * seconds[rank]
        return count * seconds[rank]

    return work


def _best_path(
    candidates: Sequence[Sequence[int]],
    work: Callable[[int, int], float],
    nodes: Callable[[int, int], int],
    limit: int,
) -> _Path | None:
    """Find the cuts with the least work for the slowest rank among those where no rank sends more than `limit` sums."""
    # Dynamic programming over ranks: for each position that the first ranks may reach, one best path is kept.
    paths = [_Path(0.0, 0, (0,))]
    for rank, stops in enumerate(candidates):
        best: dict[int, _Path] = {}
        for path in paths:
            for stop in stops:
                start = path.stops[-1]
                if stop < start or nodes(start, stop) > limit:
                    continue
                longest = max(path.longest, work(rank, stop - start))
                longer = _Path(longest, path.idle + (stop == start), (*path.stops, stop))
                if stop not in best or longer[:2] < best[stop][:2]:
                    best[stop] = longer
        paths = list(best.values())
    # The last rank can only stop at the end, so at most one path is left. There is none where the limit cannot be met.
    return paths[0] if paths else None


def update_seconds(
    runs: Sequence[range],
    leaves: Sequence[int],
    seconds: Sequence[float],
    transfer: float,
    workloads: Sequence[Sequence[float]] | None = None,
) -> float:
    """Compute the time that an update takes with given cuts; see `cut_over_ranks` for the arguments.

    >>> update_seconds([range(0, 4), range(4, 8), range(8, 8)], range(8), [1.0, 1.0, 1.0], transfer=3.0)
    8.0
    """
    return _update_seconds(runs, _work_time(seconds, workloads), _node_counter(leaves), transfer)


def transfers_per_element(nodes: Sequence[int]) -> float:
    """Compute how often every element is sent, there and back, where the ranks send these numbers of partial sums.

    >>> transfers_per_element([1, 1]), transfers_per_element([2, 2, 1]), transfers_per_element([1, 1, 0])
    (1.0, 2.0, 1.3333333333333333)
    """
    return (max(nodes) + 1) * (len(nodes) - 1) / len(nodes)


def _update_seconds(
    runs: Sequence[range],
    work: Callable[[int, int], float],
    nodes: Callable[[int, int], int],
    transfer: float,
) -> float:
    """Add the work of the slowest rank and the time of its transfers."""
    slowest = max(work(rank, len(run)) for rank, run in enumerate(runs))
    return slowest + transfers_per_element([nodes(run.start, run.stop) for run in runs]) * transfer
