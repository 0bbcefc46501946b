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
from lockstep.communicators import Watch
from lockstep.updaters.compute.clock import (
    TIMED_COMPUTATIONS,
    UNTIMED_COMPUTATIONS,
    Clock,
    MeasuredSpeeds,
    workloads_of,
)
from lockstep.updaters.compute.shares import share_of
from lockstep.updaters.ranks import rank_sum
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized, state_digest

SETTLED = UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS + 1
"""Updates after which the ranks have settled."""
NUM_UPDATES = SETTLED + 2
NUM_SHARDS = 8
CPU = torch.device("cpu")

# In one process ---------------------------------------------------------------------------------


def compute_once(speeds: MeasuredSpeeds, clock: Clock, *, samples: Sequence[int]) -> None:
    speeds.start_computation()
    run = clock.timed(lambda place: time.sleep(0.002 if samples[place] else 0.0))
    for place in range(len(samples)):
        run(place)
    shards = [plan.shards_by_device([count], 1, [1.0])[0] if count else [] for count in samples]
    speeds.end_computation([[(shard, None) for shard in each] for each in shards])


def test_speeds_are_found_once_after_the_first_computations() -> None:
    clock = Clock(Watch(), [CPU] * 3)
    speeds = MeasuredSpeeds(clock, 3)
    for number in range(UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS):
        assert speeds.found is None
        # What is not timed is of no account.
        compute_once(speeds, clock, samples=[4, 0, 12] if number >= UNTIMED_COMPUTATIONS else [100, 100, 1])
    assert speeds.found is not None
    first, none, third = speeds.found
    assert none == 0.0
    assert 0 < first < third <= 12 / 0.002
    found = list(speeds.found)
    compute_once(speeds, clock, samples=[50, 50, 50])
    assert speeds.found == found
    assert clock.timed(print) is print


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([[10.0], [10.0]], [[1.0], [1.0]]),
        ([[30.0, 0.0], [10.0]], [[1.5, 1.0], [0.5]]),
        ([[0.0], [0.0, 0.0]], [[1.0], [1.0, 1.0]]),
    ],
)
def test_workloads_are_speeds_relative_to_their_mean(speeds: list[list[float]], expected: list[list[float]]) -> None:
    assert workloads_of(speeds) == expected


@given(
    speeds=st.lists(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=3), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    num_shards=st.integers(1, 9),
)
def test_every_shard_has_one_place_at_any_speeds(speeds: list[list[float]], sizes: list[int], num_shards: int) -> None:
    ranks = tuple(map(tuple, speeds))
    parts = [share_of(ranks, rank, tuple(sizes), num_shards, False) for rank in range(len(ranks))]
    assert [len(part.shards_by_device) for part in parts] == [len(each) for each in ranks]
    places = plan.shards_by_device(sizes, num_shards, [each for rank in ranks for each in rank])
    found = [shard for part in parts for run in part.shards_by_device for shard in run]
    assert found == [shard for run in places for shard in run]
    for part in parts:
        own = [shard.index for run in part.shards_by_device for shard in run]
        assert all(part.start <= index < part.stop for index in own)
        assert not any(part.start <= shard.index < part.stop for shard in found if shard.index not in own)


# Over processes ---------------------------------------------------------------------------------


WIDTH = 150
MESSAGE = 4 * WIDTH
"""Bytes of gradients that ride with a message here, fewer than those of one layer."""


class Net(nn.Module):
    """Too many parameters to ride with a message."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # torch's gap


class Drawn:
    """A dataset that draws its samples."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4), torch.tensor(index % 3)


class Slow:
    """A loss function that takes long on the first rank, and counts the shards that it was called for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds if ls.find_communicator().rank == 0 else 0.0
        self.calls = 0

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x), target)
        if self.seconds:  # and on a busy machine longer still, for there the other rank takes long too
            time.sleep(max(self.seconds, 5 * (time.perf_counter() - begin)))
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
        # Calls of the loss function are counted, and an audit would add one.
        **{"num_shards": NUM_SHARDS, "workloads": "auto", "audit_every": 0, **options},
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
    return trained(Slow(0.004), **options)


def resumed(saved_after: int) -> dict[str, Any]:
    """Save, and go on in a fresh run, which has to measure anew, to where the others end."""
    with finalized(updater_for(Slow(0.004))) as updater, finalized(updater_for(Slow(0.004))) as fresh:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sum, "SMALL_BYTES", MESSAGE)
        return runs_on_two_ranks()


def runs_on_two_ranks() -> dict[str, dict[str, Any]]:
    return {
        "slow": slow(),
        "with a worker and two devices": slow(num_workers=1, num_devices=2),
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


Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def alone() -> str:
    end: str = trained(Slow(0.0))["end"]
    return end


@pytest.fixture(scope="module")
def two() -> Found:
    return launch_on_ranks(on_two_ranks, 2)


def counts(found: Found, name: str, when: str) -> list[int]:
    return [rank[name][when] for rank in found]


@pytest.mark.parametrize("name", ["slow", "with a worker and two devices", "in steps"])
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


@pytest.mark.parametrize(
    "name",
    [
        "slow",
        "with a worker and two devices",
        "in steps",
        "saved before",
        "saved after",
        "told",
        "not asked for",
    ],
)
def test_no_bit_shows_that_shards_moved_away_from_a_slow_rank(two: Found, name: str, alone: str) -> None:
    assert [rank[name]["end"] for rank in two] == [alone, alone]
