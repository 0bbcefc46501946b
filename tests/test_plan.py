"""The plan: cuts, runs and the order of sums, as integers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from lockstep import plan

loads = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@given(st.integers(1, 300), st.data())
def test_cut_covers_every_sample_once_and_evenly(num_samples: int, data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, num_samples))
    shards = plan.cut(num_samples, num_shards)
    sizes = [len(shard) for shard in shards]
    assert list(itertools.chain(*shards)) == list(range(num_samples))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 300), loads)
def test_assign_covers_every_shard_once_and_leaves_no_device_empty(num_shards: int, workloads: list[float]) -> None:
    runs = plan.assign(num_shards, workloads)
    assert list(itertools.chain(*runs)) == list(range(num_shards))
    assert len(runs) == len(workloads)
    if num_shards >= len(workloads):
        assert all(runs)


@given(st.integers(1, 300), loads)
def test_assign_is_in_proportion_where_no_device_has_to_be_fed(num_shards: int, workloads: list[float]) -> None:
    total = sum(map(Fraction, workloads))
    shares = [num_shards * Fraction(load) / total for load in workloads]
    if min(shares) >= 1:
        runs = plan.assign(num_shards, workloads)
        assert all(abs(len(run) - share) < 1 for run, share in zip(runs, shares, strict=True))


@given(st.integers(1, 300), st.integers(1, 9))
def test_equal_loads_make_the_first_runs_one_longer(num_shards: int, num_devices: int) -> None:
    runs = plan.assign(num_shards, [1] * num_devices)
    size, longer = divmod(num_shards, num_devices)
    assert [len(run) for run in runs] == [size + 1] * longer + [size] * (num_devices - longer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.cut(3, 4), "`num_shards` must lie in 1..`num_samples` (1..3), got 4."),
        (lambda: plan.cut(3, 0), "`num_shards` must lie in 1..`num_samples` (1..3), got 0."),
        (lambda: plan.cut(0, 1), "`num_samples` must be at least 1, got 0."),
        (lambda: plan.assign(0, [1]), "`num_shards` must be at least 1, got 0."),
        (lambda: plan.assign(3, []), "`workloads` must hold at least one number, got none."),
        (lambda: plan.assign(3, [1, 0]), "`workloads[1]` must be positive and finite, got 0."),
        (lambda: plan.assign(3, [1, -2.0]), "`workloads[1]` must be positive and finite, got -2.0."),
        (lambda: plan.assign(3, [float("nan")]), "`workloads[0]` must be positive and finite, got nan."),
        (lambda: plan.assign(3, [1, float("inf")]), "`workloads[1]` must be positive and finite, got inf."),
    ],
)
def test_counts_out_of_range_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        call()
    assert str(caught.value) == message


@given(st.integers(1, 300), st.data())
def test_dealt_shards_hold_every_sample_once_and_are_as_long_as_runs(num_samples: int, data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, num_samples))
    dealt = plan.cut(num_samples, num_shards, strided=True)
    assert sorted(itertools.chain(*dealt)) == list(range(num_samples))
    assert [len(shard) for shard in dealt] == [len(shard) for shard in plan.cut(num_samples, num_shards)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.none() | st.integers(1, 9), st.integers(1, 5))
def test_a_dealt_schedule_holds_every_sample_once(
    batch_sizes: list[int], num_shards: int | None, num_devices: int
) -> None:
    runs = plan.shards_by_device(batch_sizes, num_shards, [1.0] * num_devices, strided=True)
    shards = list(itertools.chain(*runs))
    indices = [shard.index for shard in shards]
    assert indices == sorted(set(indices))
    held = sorted((shard.batch, sample) for shard in shards for sample in shard.samples)
    assert held == [(batch, sample) for batch, size in enumerate(batch_sizes) for sample in range(size)]
