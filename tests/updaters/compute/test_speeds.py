"""``workloads="auto"`` over ranks: where shards are cut is measured, and no bit of a result shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lockstep as ls
from lockstep import plan
from lockstep.tree import Tensors
from lockstep.updaters.compute.shares import ShardAssignment, share_of
from lockstep.updaters.compute.speeds import (
    REMEASURE_FACTOR,
    TIMED_ATTEMPTS,
    UNTIMED_ATTEMPTS,
    RankMeasurement,
    RankSpeeds,
    RankTimer,
)
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized, state_digest

SETTLED = UNTIMED_ATTEMPTS + TIMED_ATTEMPTS + 1
"""Updates after which the ranks have settled."""
NUM_UPDATES = SETTLED + 3
NUM_SHARDS = 8
CPU = torch.device("cpu")

# As arithmetic ----------------------------------------------------------------------------------


def measured_speeds(*told: RankMeasurement, before: RankSpeeds | None = None) -> RankSpeeds:
    return RankSpeeds.from_measurements(told, before)


def test_ranks_that_are_about_equally_fast_are_given_their_mean() -> None:
    told = RankMeasurement(1.0, 0.1), RankMeasurement(1.2, 0.3), RankMeasurement(3.0, 0.2)
    assert measured_speeds(*told) == RankSpeeds((1.1, 1.1, 3.0), 0.3)


def test_a_rank_that_had_no_shard_is_as_fast_as_it_was_or_as_the_others_are() -> None:
    told = RankMeasurement(1.0, 0.0), RankMeasurement(None, 0.0), RankMeasurement(3.0, 0.0)
    assert measured_speeds(*told).seconds == (1.0, 2.0, 3.0)
    assert measured_speeds(*told, before=RankSpeeds((1.0, 9.0, 1.0), 0.0)).seconds == (1.0, 9.0, 3.0)


@pytest.mark.parametrize(
    ("speeds", "workloads", "expected"),
    [
        (RankSpeeds((1.0, 1.0, 1.0), 0.0), (1, 1, 1), [3, 3, 2]),
        (RankSpeeds((1.0, 1.0, 1.0), 10.0), (1, 1, 1), [2, 2, 4]),
        (RankSpeeds((1.0, 1.0, 4.0), 0.0), (1, 1, 1), [4, 3, 1]),
    ],
)
def test_shards_move_where_that_is_faster(speeds: RankSpeeds, workloads: Sequence[float], expected: list[int]) -> None:
    usual = plan.assign(NUM_SHARDS, workloads)
    cut = speeds.cut(range(NUM_SHARDS), usual, [[each] for each in workloads])
    assert [len(run) for run in cut] == expected


def test_shards_stay_where_the_gain_is_small() -> None:
    usual = [range(10), range(10, 20)]
    assert RankSpeeds((1.0, 1.05), 0.0).cut(range(20), usual, [[1.0], [1.0]]) == usual
    assert RankSpeeds((1.0, 1.5), 0.0).cut(range(20), usual, [[1.0], [1.0]]) == [range(12), range(12, 20)]


@given(
    speeds=st.lists(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=3), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    num_shards=st.integers(1, 9),
    transfer=st.sampled_from([0.0, 0.5, 20.0]),
    data=st.data(),
)
def test_every_shard_has_one_place_at_any_speeds(
    speeds: list[list[float]], sizes: list[int], num_shards: int, transfer: float, data: st.DataObject
) -> None:
    seconds = tuple(data.draw(st.sampled_from([1.0, 3.0, 7.0])) for _ in speeds)
    ranks = tuple(map(tuple, speeds))
    parts = [
        share_of(
            ShardAssignment(ranks[:rank], ranks[rank + 1 :], RankSpeeds(seconds, transfer)),
            tuple(sizes),
            num_shards,
            ranks[rank],
            False,
        )
        for rank in range(len(ranks))
    ]
    assert [len(part.shards_by_device) for part in parts] == [len(each) for each in ranks]
    places = plan.shards_by_device(sizes, num_shards, [each for rank in ranks for each in rank])
    found = [shard for part in parts for run in part.shards_by_device for shard in run]
    assert found == [shard for run in places for shard in run]
    for part in parts:
        own = [shard.index for run in part.shards_by_device for shard in run]
        assert all(part.start <= index < part.stop for index in own)
        assert not any(part.start <= shard.index < part.stop for shard in found if shard.index not in own)


# The clock --------------------------------------------------------------------------------------


class Clock:
    """Stands still unless it is moved."""

    seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


def one_attempt(timer: RankTimer, *, work: float, sum_: float, ends: bool = True, clock: Clock | None = None) -> None:
    clock = Clock() if clock is None else clock
    timer.start_attempt()
    clock.seconds += work
    timer.end_compute(CPU, [plan.shards_by_device([4], 4, [1.0])[0]], [1.0])
    clock.seconds += 0.5  # that nobody asks for
    timer.start_sum()
    clock.seconds += sum_
    if ends:
        timer.end_sum(CPU, [1, 1])


def test_the_fastest_of_the_tries_that_came_to_their_end_counts() -> None:
    clock = Clock()
    timer = RankTimer(measuring=True, clock=clock)
    for _ in range(UNTIMED_ATTEMPTS):
        one_attempt(timer, work=0.0, sum_=0.0, clock=clock)  # too fast to be true, and not measured
    for late in range(TIMED_ATTEMPTS):
        assert timer.measurement is None
        one_attempt(timer, work=0.0, sum_=0.0, ends=False, clock=clock)
        one_attempt(timer, work=4.0 + late, sum_=3.0 + late, clock=clock)
    told = timer.measurement
    assert told == RankMeasurement(1.0, 3.0)  # four shards, one journey


def measured(timer: RankTimer) -> int:
    """Count the tries until there is something to tell."""
    for number in range(100):
        if timer.measurement is not None:
            return number
        one_attempt(timer, work=0.0, sum_=0.0)
        timer.adopt([RankMeasurement(1.0, 0.0), None])
    raise AssertionError("nothing was ever told")


def test_ranks_settle_once_all_have_told_something_and_again_much_later() -> None:
    timer = RankTimer(measuring=True)
    assert measured(timer) == UNTIMED_ATTEMPTS + TIMED_ATTEMPTS
    assert timer.measuring
    assert timer.speeds is None
    timer.adopt([RankMeasurement(1.0, 0.5), RankMeasurement(2.0, 0.1)])
    for _ in range((REMEASURE_FACTOR - 1) * SETTLED):
        assert not timer.measuring
        assert timer.speeds == RankSpeeds((1.0, 2.0), 0.5)
        assert timer.measurement is None
        one_attempt(timer, work=0.0, sum_=0.0)
        timer.adopt([None, None])
    assert measured(timer) == UNTIMED_ATTEMPTS + TIMED_ATTEMPTS
    timer.adopt([RankMeasurement(None, 0.7), RankMeasurement(3.0, 0.1)])
    assert timer.speeds == RankSpeeds((1.0, 3.0), 0.7)
    assert not timer.measuring


def test_ranks_are_timed_anew_once_their_devices_share_the_work_in_another_way() -> None:
    timer = RankTimer(measuring=True)
    assert measured(timer) == UNTIMED_ATTEMPTS + TIMED_ATTEMPTS
    timer.adopt([RankMeasurement(1.0, 0.5), RankMeasurement(2.0, 0.1)])
    timer.restart()
    assert timer.measuring
    assert timer.speeds == RankSpeeds((1.0, 2.0), 0.5)  # better than nothing
    assert measured(timer) == UNTIMED_ATTEMPTS + TIMED_ATTEMPTS
    timer.adopt([RankMeasurement(4.0, 0.5), RankMeasurement(2.0, 0.1)])
    assert timer.speeds == RankSpeeds((4.0, 2.0), 0.5)
    assert not timer.measuring


def test_what_may_not_move_is_not_timed() -> None:
    timer = RankTimer(measuring=False)
    for _ in range(2 * SETTLED):
        one_attempt(timer, work=0.0, sum_=0.0)
        assert timer.measurement is None
        timer.adopt([None, None])
        timer.restart()
    assert not timer.measuring
    assert timer.speeds is None


# Over processes ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Too many parameters to ride with a message."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 600), nn.BatchNorm1d(600), nn.Dropout(0.2), nn.Linear(600, 600), nn.Linear(600, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # torch's gap


class Drawn:
    """A dataset that draws its samples."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4), torch.tensor(index % 3)


class Dear(ls.ProcessCommunicator):
    """Takes long for every sum of gradients, until the ranks have settled."""

    sums = 0

    def sum_partials(self, *arguments: Any, compress: bool = True, **options: Any) -> Tensors:
        """Wait, then add up; buffers, which are not compressed, at once."""
        if compress and self.sums < SETTLED:
            time.sleep(0.2)
            self.sums += 1
        return super().sum_partials(*arguments, compress=compress, **options)


class Slow:
    """A loss function that takes long on the first rank, and counts the shards that it was called for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds if ls.find_communicator().rank == 0 else 0.0
        self.calls = 0

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x), target)
        if self.seconds:  # and on a busy machine longer still, for there the other rank takes long too
            time.sleep(max(self.seconds, 10 * (time.perf_counter() - begin)))
        self.calls += 1
        return loss


def updater_for(loss_fn: Slow, *, num_workers: int = 0, num_devices: int = 1, **options: Any) -> ls.ParallelUpdater:
    torch.manual_seed(1)
    model = Net()
    return ls.ParallelUpdater(
        ls.BatchIterator(Drawn(), 16, shuffle=True, num_workers=num_workers),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model,
        devices=["cpu"] * num_devices,
        loss_fn=loss_fn,
        **{"num_shards": NUM_SHARDS, "workloads": "auto", **options},
    )


def trained(loss_fn: Slow, **options: Any) -> dict[str, Any]:
    """Train; give the end, and how many shards were computed here in the first and the last update."""
    with finalized(updater_for(loss_fn, **options)) as updater:
        counts = []
        for _ in range(NUM_UPDATES):
            loss_fn.calls = 0
            updater.update()
            counts.append(loss_fn.calls)
        return {"end": state_digest(updater), "first": counts[0], "last": counts[-1]}


def slow(**options: Any) -> dict[str, Any]:
    return trained(Slow(0.03), **options)


def resumed(saved_after: int) -> dict[str, Any]:
    """Save, and go on in a fresh run, which has to measure anew, to where the others end."""
    with finalized(updater_for(Slow(0.03))) as updater, finalized(updater_for(Slow(0.03))) as fresh:
        for _ in range(saved_after):
            updater.update()
        fresh.load_state_dict(updater.state_dict())
        while fresh.iteration < NUM_UPDATES:
            fresh.update()
        return {"end": state_digest(fresh)}


def compressed() -> dict[str, Any]:
    watch = ls.find_communicator().watch
    return slow(communicator=ls.ProcessCommunicator(compression="bf16", watch=watch))


def refused() -> dict[str, Any]:
    try:
        updater_for(Slow(0.0), workloads=None if ls.find_communicator().rank == 0 else "auto")
    except ValueError as error:
        return {"error": str(error)}
    return {}


def on_two_ranks() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {
        "slow": slow(),
        "with a worker": slow(num_workers=1),
        "with two devices": slow(num_devices=2),
        "in steps": slow(step_fn=step),
        "saved before": resumed(SETTLED - 2),
        "saved after": resumed(SETTLED + 1),
        "told": slow(workloads=[1.0]),
        "not asked for": slow(workloads=None),
        "asked for on one rank": refused(),
        "compressed": compressed(),
        "a shard a place": slow(num_shards=None, workloads=None),
    }


def step(updater: ls.ParallelUpdater, batch: Any) -> None:
    updater.compute_gradients(batch)
    updater.apply_gradients()


def on_three_ranks() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {
        "dear": trained(Slow(0.0), communicator=Dear(watch=ls.find_communicator().watch)),
        "cheap": trained(Slow(0.0)),
    }


Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def alone() -> str:
    end: str = trained(Slow(0.0))["end"]
    return end


@pytest.fixture(scope="module")
def two() -> Found:
    return launch_on_ranks(on_two_ranks, 2)


@pytest.fixture(scope="module")
def three() -> Found:
    return launch_on_ranks(on_three_ranks, 3)


def counts(found: Found, name: str, when: str) -> list[int]:
    return [rank[name][when] for rank in found]


@pytest.mark.parametrize("name", ["slow", "with a worker", "with two devices", "in steps"])
def test_a_slow_rank_is_given_fewer_shards(two: Found, name: str) -> None:
    assert counts(two, name, "first") == [4, 4]
    fewer, more = counts(two, name, "last")
    assert fewer < 4 < more
    assert fewer + more == NUM_SHARDS


@pytest.mark.parametrize("name", ["told", "not asked for", "compressed"])
def test_shards_stay_where_nobody_asks_for_it_or_bits_would_change(two: Found, name: str) -> None:
    assert counts(two, name, "last") == [4, 4]


def test_places_keep_their_own_shard_where_nobody_says_how_many_there_are(two: Found) -> None:
    assert counts(two, "a shard a place", "last") == [1, 1]


def test_ranks_are_refused_that_do_not_all_ask_for_it(two: Found) -> None:
    for rank in two:
        assert rank["asked for on one rank"]["error"].startswith(
            '`workloads` must be "auto" on every rank or on none, got it on rank 1 and not on rank 0.'
        )


def test_dear_bytes_move_shards_until_ranks_have_whole_nodes(three: Found) -> None:
    assert counts(three, "dear", "first") == [3, 3, 2]
    start = 0
    for count in counts(three, "dear", "last"):  # how many, a busy machine may say, where one rank is slow
        assert count == 0 or (count in {1, 2, 4, NUM_SHARDS} and start % count == 0)
        start += count
    assert start == NUM_SHARDS


@pytest.mark.parametrize(
    "name",
    [
        "slow",
        "with a worker",
        "with two devices",
        "in steps",
        "saved before",
        "saved after",
        "told",
        "not asked for",
    ],
)
def test_no_bit_shows_that_shards_moved_away_from_a_slow_rank(two: Found, name: str, alone: str) -> None:
    assert [rank[name]["end"] for rank in two] == [alone, alone]


@pytest.mark.parametrize("name", ["dear", "cheap"])
def test_no_bit_shows_what_bytes_cost(three: Found, name: str, alone: str) -> None:
    assert [rank[name]["end"] for rank in three] == [alone] * 3
