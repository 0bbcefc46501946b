"""Cuts over ranks: even work against few partial sums."""

from __future__ import annotations

import itertools
import random

import pytest

from lockstep.plan import assign
from lockstep.tree import ShardSum
from lockstep.updaters.compute.cuts import cut_over_ranks, update_seconds

TRANSFERS = [0.0, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0]


def all_cuts(num_shards: int, size: int) -> list[list[range]]:
    cuts = itertools.combinations_with_replacement(range(num_shards + 1), size - 1)
    return [[range(start, stop) for start, stop in itertools.pairwise((0, *cut, num_shards))] for cut in cuts]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 6, 8, 11, 12])
def test_no_cut_of_few_shards_over_equal_ranks_is_faster(num_shards: int, size: int) -> None:
    leaves, seconds = list(range(num_shards)), [1.0] * size
    for transfer in TRANSFERS:
        best = min(update_seconds(runs, leaves, seconds, transfer) for runs in all_cuts(num_shards, size))
        chosen = cut_over_ranks(leaves, seconds, transfer)
        assert update_seconds(chosen, leaves, seconds, transfer) == pytest.approx(best)


def test_unequal_ranks_and_missing_shards_never_take_longer_than_with_even_cuts() -> None:
    rng = random.Random(0)  # noqa: S311 - no secret
    for _ in range(100):
        size, num_shards = rng.randint(1, 6), rng.randint(1, 40)
        leaves = sorted(rng.sample(range(60), num_shards))
        seconds = [0.5 + rng.random() for _ in range(size)]
        transfer = rng.choice(TRANSFERS)
        chosen = cut_over_ranks(leaves, seconds, transfer)
        even = assign(num_shards, [1.0 / each for each in seconds])
        assert [place for run in chosen for place in run] == list(range(num_shards))
        assert update_seconds(chosen, leaves, seconds, transfer) <= update_seconds(even, leaves, seconds, transfer)


def test_costly_bytes_move_the_cuts_to_whole_nodes() -> None:
    leaves = list(range(8))
    cheap, costly = (cut_over_ranks(leaves, [1.0, 1.0, 1.0], transfer) for transfer in (0.0, 100.0))
    assert [len(run) for run in cheap] == [3, 3, 2]
    for run in costly:
        place = ShardSum(first=run.start)
        for shard in run:
            place.push(shard, [])
        assert len(place.partials) == 1


def test_a_rank_takes_as_long_as_the_slowest_of_its_places() -> None:
    places = [[1.0, 1.0], [1.0, 1.0]]
    seconds = [2.0, 1.0]
    assert [len(run) for run in cut_over_ranks(range(4), seconds, 0.1)] == [1, 3]
    # One shard takes the first rank as long as two, and three the second as long as four.
    assert [len(run) for run in cut_over_ranks(range(4), seconds, 0.1, places)] == [2, 2]
    assert update_seconds([range(1), range(1, 4)], range(4), seconds, 0.0, places) == 4.0


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="`transfer` must be at least 0, got -1"):
        cut_over_ranks([0], [1.0], -1)
