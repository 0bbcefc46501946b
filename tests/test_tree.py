"""The tree: one order of additions, whoever adds."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep import tree


def merges(num_shards: int) -> list[list[tuple[int, int]]]:
    """List the additions that sum all shards into shard 0, level by level: the specification of the tree.

    A pair ``(into, other)`` means "add ``other`` to ``into``".

    >>> merges(5)
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    """
    strides = [2**level for level in range((num_shards - 1).bit_length())]
    return [[(into, into + stride) for into in range(0, num_shards - stride, 2 * stride)] for stride in strides]


@given(st.integers(1, 500))
def test_merges_add_every_other_shard_exactly_once(num_shards: int) -> None:
    levels = merges(num_shards)
    assert sorted(other for level in levels for _, other in level) == list(range(1, num_shards))
    assert len(levels) == (num_shards - 1).bit_length()


def leaves(num_shards: int, *, absent: frozenset[int] = frozenset()) -> dict[int, list[torch.Tensor | None]]:
    """Tensors whose sum depends on the order of additions, for each shard but the absent ones."""
    values = {}
    for shard in range(num_shards):
        generator = torch.Generator().manual_seed(shard)
        exponent = torch.randint(-8, 8, (7,), generator=generator)
        value: torch.Tensor | None = torch.randn(7, generator=generator) * 2.0**exponent
        values[shard] = [value, torch.randn(3, generator=generator)]
    return {shard: tensors for shard, tensors in values.items() if shard not in absent}


def by_plan(num_shards: int, absent: frozenset[int] = frozenset()) -> list[torch.Tensor | None]:
    """The specification: the additions that `merges` lists, absent ones passed over."""
    values = leaves(num_shards, absent=absent)
    sums = [values.get(shard) for shard in range(num_shards)]
    for into, other in itertools.chain.from_iterable(merges(num_shards)):
        left, right = sums[into], sums[other]
        if left is None or right is None:
            sums[into] = right if left is None else left
        else:
            sums[into] = [a + b for a, b in zip(left, right, strict=True)]
    return sums[0]


def by_places(num_shards: int, cuts: list[int], absent: frozenset[int] = frozenset()) -> list[torch.Tensor | None]:
    """The same sum made by several places, each on a run of shards between two cuts."""
    values = leaves(num_shards, absent=absent)
    partials = []
    for start, stop in itertools.pairwise([0, *cuts, num_shards]):
        place = tree.ShardSum(first=start)
        for shard in range(start, stop):
            if shard in values:
                place.push(shard, values[shard])
        partials += place.partials
    return tree.total(partials)


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


@st.composite
def cut_shards(draw: st.DrawFn) -> tuple[int, list[int], frozenset[int]]:
    num_shards = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(0, num_shards), max_size=5)))
    absent = draw(st.frozensets(st.integers(0, num_shards - 1), max_size=num_shards - 1))
    return num_shards, cuts, absent


@given(cut_shards())
def test_any_cut_over_places_gives_the_planned_sum(case: tuple[int, list[int], frozenset[int]]) -> None:
    num_shards, cuts, absent = case
    assert same(by_places(num_shards, cuts, absent), by_plan(num_shards, absent))


@given(st.integers(1, 64), st.randoms(use_true_random=False))
def test_any_interleaving_of_the_plan_gives_the_same_sum(num_shards: int, rng: random.Random) -> None:
    values = leaves(num_shards)
    for level in merges(num_shards):
        for into, other in rng.sample(level, len(level)):
            tree.add_into(values[into], values[other])
    assert same(values[0], by_plan(num_shards))


def test_the_law_is_not_empty_another_order_gives_other_bits() -> None:
    values = leaves(8)
    folded = values[0]
    for shard in range(1, 8):
        tree.add_into(folded, values[shard])
    assert not same(folded, by_plan(8))


@given(st.integers(0, 6), st.integers(0, 100), st.integers(1, 64))
def test_live_partial_sums_stay_logarithmic(height: int, block: int, num_shards: int) -> None:
    first = block << height
    place = tree.ShardSum(first=first)
    live = 0
    for shard in range(first, first + num_shards):
        place.push(shard, [torch.ones(1)])
        live = max(live, len(place.partials))
    bound = num_shards.bit_length()
    assert live <= (bound if first % (1 << bound) == 0 else 2 * bound)


def test_an_absent_gradient_is_not_a_zero() -> None:
    # -0.0 + 0.0 is 0.0: a zero in place of an absent gradient would change a bit.
    negative_zero = torch.tensor([-0.0])
    sums: list[torch.Tensor | None] = [negative_zero]
    tree.add_into(sums, [None])
    assert torch.signbit(sums[0]).item()


def test_a_gradient_that_no_shard_has_stays_absent() -> None:
    sums: list[torch.Tensor | None] = [None, torch.ones(1)]
    tree.add_into(sums, [None, torch.ones(1)])
    assert sums[0] is None
    assert torch.equal(sums[1], torch.tensor([2.0]))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8, 13])
def test_merge_order_of_single_shards_is_the_plan(num_shards: int) -> None:
    planned = set(itertools.chain.from_iterable(merges(num_shards)))
    assert set(tree.merge_order(range(num_shards))) == planned
