"""The placement law over processes: weights, buffers, state and measurements do not depend on the ranks."""

from __future__ import annotations

import pytest

from lockstep import Communicator
from tests.communicators.groups import run_on_ranks
from tests.laws.models import CONVNET
from tests.laws.on_ranks import RUNS, all_runs, in_one_process, trained


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    return in_one_process(list(RUNS))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_are_only_places(size: int, alone: dict[str, str]) -> None:
    for rank, found in enumerate(run_on_ranks(all_runs, size, list(RUNS), [1, 2])):
        differing = [key for key, digest in found.items() if digest != alone[key[0]]]
        assert not differing, f"rank {rank}: {differing}"
        assert len(found) == 2 * len(alone)


def test_without_a_number_of_shards_the_places_of_all_ranks_are_the_shards() -> None:
    four = trained(1, work=CONVNET, num_shards=4)
    assert run_on_ranks(four_places, 2) == [four, four]
    assert trained(1, work=CONVNET, num_shards=2) != four


def four_places(communicator: Communicator) -> str:
    return trained(4 // communicator.size, work=CONVNET, num_shards=None)
