"""Choose where shards are cut over ranks: even work against few partial sums to send.

A cut changes no bit, for the tree is over shards and not over ranks. But a rank whose run of shards makes up
one node of the tree sends one partial sum, and any other run makes several.
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
    """The best way found to give shards to the first ranks; compared by its first two fields.

    Attributes:
        longest: Seconds that the slowest of them works.
        idle: How many of them have no shard.
        stops: 0, and where each of them ends.
    """

    longest: float
    idle: int
    stops: tuple[int, ...]


def cut_over_ranks(
    leaves: Sequence[int],
    seconds: Sequence[float],
    transfer: float,
    places: Sequence[Sequence[float]] | None = None,
) -> list[range]:
    """Give each rank a run of neighbouring shards, for the least time of work and of the sum over ranks.

    The time is that of the slowest rank's shards plus that of its bytes: with W ranks and n nodes on the rank
    that has most, every element travels n·(W-1)/W times towards the owners and (W-1)/W times back. Of equally
    fast ways to move shards, the one that leaves fewest ranks without any is taken. Looked at are the cuts
    of `plan.assign` and those next to even ones by one shard or by as much as leads to a multiple of a power
    of two.

    Args:
        leaves: The number in the tree of each shard that exists, ascending.
        seconds: How long a rank takes for a shard, where all its places are at work; only relative to
            `transfer` do they matter.
        transfer: How long it takes to send all gradients of a model once from one rank to another.
        places: The work loads of each rank's places; by default it has one.

    Returns:
        For each rank its shards, as positions in `leaves`; maybe none.

    Raises:
        ValueError: There is no shard or no rank, or a time is out of range.

    Determinism: ranks that are given the same numbers choose the same cuts.

    >>> cut_over_ranks(range(8), [1.0, 1.0, 1.0], transfer=0.1)
    [range(0, 3), range(3, 6), range(6, 8)]
    >>> cut_over_ranks(range(8), [1.0, 1.0, 1.0], transfer=10.0)
    [range(0, 2), range(2, 4), range(4, 8)]
    """
    check_workloads(seconds)
    if transfer < 0:
        raise ValueError(f"`transfer` must be at least 0, got {transfer}.")
    even = assign(len(leaves), [1.0 / each for each in seconds])
    nodes, work = _node_counter(leaves), _work_timer(seconds, places)
    reach = 2 * max(map(len, even))
    candidates = [_near(run.stop, leaves, reach) for run in even]
    most = reach.bit_length()
    found = [even]
    for limit in range(1, most + 1):
        path = _shortest(candidates, work, nodes, limit)
        if path is not None:
            found.append([range(*ends) for ends in pairwise(path.stops)])
    return min(found, key=lambda runs: _time(runs, work, nodes, transfer))


def _near(stop: int, leaves: Sequence[int], reach: int) -> list[int]:
    """List positions of cuts: the even one, its neighbours, and those within reach that end a subtree."""
    if stop in (0, len(leaves)):
        return [stop]
    leaf = leaves[stop]
    wanted = {leaf}
    for height in range(1, reach.bit_length() + 1):
        below = leaf >> height << height
        wanted |= {below, below + (1 << height)}
    near = {bisect_left(leaves, each) for each in wanted}
    return sorted(near | {stop - 1, stop + 1})


def _node_counter(leaves: Sequence[int]) -> Callable[[int, int], int]:
    """Count the partial sums that a run of shards comes to."""

    @cache
    def nodes(start: int, stop: int) -> int:
        if start == stop:
            return 0
        place = ShardSum(first=leaves[start])
        for leaf in leaves[start:stop]:
            place.push(leaf, [])
        place.merge_complete(leaves[stop] if stop < len(leaves) else 1 << leaves[-1].bit_length())
        return len(place.partials)

    return nodes


def keeping_up(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Count the shards that places could compute in the time that the slowest takes for its own.

    Args:
        counts: The shards of each place.
        speeds: Their work loads.

    >>> keeping_up([2, 1], [1.0, 1.0]), keeping_up([2, 1], [2.0, 1.0])
    (4.0, 3.0)
    """
    return max(count / speed for count, speed in zip(counts, speeds, strict=True)) * fsum(speeds)


def _work_timer(seconds: Sequence[float], places: Sequence[Sequence[float]] | None) -> Callable[[int, int], float]:
    """Time the work of a rank on so many shards."""

    @cache
    def work(rank: int, count: int) -> float:
        if count and places is not None:
            counts = [len(run) for run in assign(count, places[rank])]
            return keeping_up(counts, places[rank]) * seconds[rank]
        return count * seconds[rank]

    return work


def _shortest(
    candidates: Sequence[Sequence[int]],
    work: Callable[[int, int], float],
    nodes: Callable[[int, int], int],
    limit: int,
) -> _Path | None:
    """Find the cuts with the least work for the slowest rank, where none sends more than so many sums."""
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
    return paths[0] if paths else None


def time_of(
    runs: Sequence[range],
    leaves: Sequence[int],
    seconds: Sequence[float],
    transfer: float,
    places: Sequence[Sequence[float]] | None = None,
) -> float:
    """Give the seconds that an update takes with these cuts; see `cut_over_ranks`.

    >>> time_of([range(0, 4), range(4, 8), range(8, 8)], range(8), [1.0, 1.0, 1.0], transfer=3.0)
    8.0
    """
    return _time(runs, _work_timer(seconds, places), _node_counter(leaves), transfer)


def journeys(nodes: Sequence[int]) -> float:
    """Count how often every element travels, there and back, while ranks send so many partial sums each.

    >>> journeys([1, 1]), journeys([2, 2, 1]), journeys([1, 1, 0])
    (1.0, 2.0, 1.3333333333333333)
    """
    return (max(nodes) + 1) * (len(nodes) - 1) / len(nodes)


def _time(
    runs: Sequence[range],
    work: Callable[[int, int], float],
    nodes: Callable[[int, int], int],
    transfer: float,
) -> float:
    """Add up the work of the slowest rank and what its bytes take."""
    slowest = max(work(rank, len(run)) for rank, run in enumerate(runs))
    return slowest + journeys([nodes(run.start, run.stop) for run in runs]) * transfer
