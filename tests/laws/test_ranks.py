"""The placement law over processes: weights, buffers, state and measurements do not depend on the ranks."""

from __future__ import annotations

import random

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


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    return in_one_process(list(RUNS))


@pytest.mark.parametrize(
    ("size", "devices"), [(3, [2]), *(pytest.param(each, [1, 2], marks=pytest.mark.slow) for each in (2, 3, 4))]
)
def test_processes_are_only_places(size: int, devices: list[int], alone: dict[str, str]) -> None:
    for rank, found in enumerate(run_on_ranks(all_runs, size, list(RUNS), devices)):
        differing = [key for key, digest in found.items() if digest != alone[key[0]]]
        assert not differing, f"rank {rank}: {differing}"
        assert len(found) == len(devices) * len(alone)


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
def test_the_law_bites_each_way_to_break_it_is_caught(size: int, alone: dict[str, str]) -> None:
    names = [name for name, (_, needed, _) in MUTANTS.items() if needed == size]
    found, *_ = launch_on_ranks(mutated, size, names)
    assert {name for name, _ in found} == set(names)
    missed = [key for key, digest in found.items() if digest == alone[f"{key[1]}, fp32"]]
    assert not missed
