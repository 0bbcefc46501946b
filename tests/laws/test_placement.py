"""The placement law: weights, buffers and optimizer state do not depend on the devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.runs import DAILY, ONE, UNEVEN, Placement, digests, train
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, WIDE, Workload

RECIPES = [
    pytest.param({"num_shards": 5, "optimizer": "sgd"}, id="5 shards, SGD"),
    pytest.param({"num_shards": 6, "optimizer": "adamw", "clip": 0.3}, id="6 shards, AdamW, clipped"),
    pytest.param({"num_shards": 5, "optimizer": "corrected", "clip": 0.3}, id="5 shards, corrected, clipped"),
]


@pytest.fixture
def two_intra_op_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
@DAILY
def test_devices_are_only_places(
    placements: list[Placement], work: Workload, precision: str, recipe: dict[str, object]
) -> None:
    found = digests(work, placements, precision=precision, **recipe)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
def test_the_law_is_not_empty_the_number_of_shards_changes_the_result(work: Workload) -> None:
    assert train(work, num_shards=5) != train(work, num_shards=6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "corrected"])
@DAILY
def test_summing_and_stepping_side_by_side_changes_no_bit(placements: list[Placement], optimizer: str) -> None:
    found = digests(WIDE, placements, num_shards=5, optimizer=optimizer, updates=5)
    assert len(set(found.values())) == 1, found


@pytest.mark.usefixtures("two_intra_op_threads")
@pytest.mark.parametrize("work", [TRANSFORMER, WIDE], ids=repr)
def test_the_ambient_number_of_intra_op_threads_changes_no_bit(work: Workload) -> None:
    found = digests(work, UNEVEN, num_shards=5)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    found[Placement(1, (1,))] = train(work, ONE, num_shards=5)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("accumulate", [2, 3])
@DAILY
def test_the_law_holds_for_accumulated_batches(placements: list[Placement], accumulate: int) -> None:
    found = digests(CONVNET, placements, num_shards=3, accumulate=accumulate, updates=5)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("buffers", ["mean", "first"])
@DAILY
def test_the_law_holds_for_both_rules_of_buffers(placements: list[Placement], buffers: str) -> None:
    found = digests(CONVNET, placements, num_shards=5, buffers=buffers, updates=5)
    assert len(set(found.values())) == 1, found


def test_without_a_number_of_shards_the_devices_are_the_shards() -> None:
    by_devices = train(CONVNET, Placement(3))
    assert by_devices == train(CONVNET, ONE, num_shards=3)
    assert by_devices != train(CONVNET, ONE)
