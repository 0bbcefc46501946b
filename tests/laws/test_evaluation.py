"""The placement law of evaluations: what is logged does not depend on devices and ranks, and training sees nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.programs.evaluating import differing_batches, evaluate, failing_rank
from tests.support.ranks import launch_on_ranks

pytest.importorskip("torchmetrics", reason="its metrics are evaluated")
pytestmark = pytest.mark.filterwarnings("ignore:.*torchmetrics.*:UserWarning")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return evaluate(1)


@pytest.mark.parametrize("devices", [3])
def test_devices_are_only_places(alone: dict[str, Any], devices: int) -> None:
    assert evaluate(devices) == alone


@pytest.mark.parametrize(
    ("ranks", "devices"), [*(pytest.param(2, each, marks=pytest.mark.slow) for each in (1, 2)), (3, 1)]
)
def test_ranks_are_only_places(alone: dict[str, Any], ranks: int, devices: int) -> None:
    assert launch_on_ranks(evaluate, ranks, devices) == [alone] * ranks


def test_whole_batches_over_devices_are_those_of_one_device() -> None:
    whole = evaluate(1, num_shards=1)
    assert evaluate(3, num_shards=1) == whole


def test_training_sees_nothing_of_evaluations(alone: dict[str, Any]) -> None:
    without = evaluate(1, evaluating=False)
    assert without["digest"] == alone["digest"]
    assert without["modes"] == alone["modes"]
    assert [entry["main/loss"] for entry in without["log"]] == [entry["main/loss"] for entry in alone["log"]]


def test_ranks_with_other_batches_are_told() -> None:
    for message in launch_on_ranks(differing_batches, 2, None):
        assert message.startswith("The evaluation batches of rank 1 must be those of rank 0, but batch 0 differs.")


def test_the_error_of_one_rank_is_raised_on_all() -> None:
    first, second = launch_on_ranks(failing_rank, 2, None)
    assert first.startswith("PeerError: Rank 1 raised ReplicaError: The forward of shard 1")
    assert second.startswith("ReplicaError: The forward of shard 1")
    assert "the model broke" in first
