"""The placement law over processes: weights, buffers, state and measurements do not depend on the ranks."""

from __future__ import annotations

import random
from functools import cache

import pytest

from lockstep import Communicator
from lockstep.plan import assign
from tests.support.programs.placement import (
    MUTANTS,
    NUM_UPDATES,
    RUNS,
    all_runs,
    drawn_workloads,
    in_one_process,
    mutated,
    trained,
)
from tests.support.ranks import launch_on_ranks, run_on_ranks
from tests.support.workloads import CONVNET

# One of the runs weighs its losses by something else than samples on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean over the samples:UserWarning")


DAILY = [
    *("six shards, clipped", "accumulated by epoch", "first buffers", "uneven devices", "moved about, strided"),
    *("above the limit of one thread", "fp16-true, overflowing, skip", "measured", "weightless"),
    *("retried", "passed over", "two networks", "by halves", "not finite"),
]
"""A run for each option; others combine them in another way."""


@cache
def alone(name: str) -> str:
    return in_one_process([name])[name]


@pytest.mark.parametrize(
    ("size", "devices", "names"),
    [
        pytest.param(3, [2], DAILY, id="3 ranks"),
        *(pytest.param(each, [1, 2], [*RUNS], id=f"{each} ranks, all", marks=pytest.mark.slow) for each in (2, 3, 4)),
    ],
)
def test_processes_are_only_places(size: int, devices: list[int], names: list[str]) -> None:
    for rank, found in enumerate(run_on_ranks(all_runs, size, names, devices)):
        differing = [key for key, digest in found.items() if digest != alone(key[0])]
        assert not differing, f"rank {rank}: {differing}"
        assert len(found) == len(devices) * len(names)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_that_are_moved_about_do_move(size: int) -> None:
    generator, cuts = random.Random(0), set()  # noqa: S311 - no secret
    for _ in range(3 * NUM_UPDATES):
        workloads = drawn_workloads(generator, [[1.0]] * size)
        cuts.add(tuple(map(len, assign(8, [each for (each,) in workloads]))))
    assert len(cuts) > 2, cuts


def test_without_a_number_of_shards_the_places_of_all_ranks_are_the_shards() -> None:
    four = trained(1, work=CONVNET, num_shards=4)
    assert run_on_ranks(four_places, 2) == [four, four]
    assert trained(1, work=CONVNET, num_shards=2) != four


def four_places(communicator: Communicator) -> str:
    return trained(4 // communicator.size, work=CONVNET, num_shards=None)


@pytest.mark.parametrize("size", [2, 4])
def test_the_law_bites_each_way_to_break_it_is_caught(size: int) -> None:
    names = [name for name, (_, needed, _) in MUTANTS.items() if needed == size]
    found, *_ = launch_on_ranks(mutated, size, names)
    assert [*found] == names
    assert [name for name, digest in found.items() if digest == alone(f"{MUTANTS[name][2]}, fp32")] == []
