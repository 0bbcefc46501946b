"""Ranks that are given other batches find out in that update, before anything has changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import zygote
from tests.support.programs import given_batches

SCRIPT = Path(given_batches.__file__)
CURE = "remove a DistributedSampler and every other split of the data by rank, and use seeds that do not depend"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("given")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, folder]
    done = zygote.run(torchrun)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "updates", "words"),
    [
        ("iterable", 0, "the batch of iterator 'main' has other samples (batch[0]: float32 (8, 6), "),
        ("seed of a loader", 0, "the batch of iterator 'main' has other samples"),
        ("get_batch", 0, "the batch of iterator 'main' has other samples"),
        ("list", 0, "the batch of iterator 'main' has other samples"),
        ("last batch", 3, "the batch of iterator 'main' is batch[0]: float32 (4, 6), batch[1]: int64 (4,) and not "),
        ("subset", 0, "has other samples (8 samples of a dataset of 32 on both)"),
        ("dataset", 0, "has the same indices, but the samples of its dataset differ (8 samples of a dataset of 32 on"),
        ("order", 0, "has other samples (8 samples of a dataset of 64 on both)"),
        ("samples", 0, "has other samples (8 samples on both)"),
        ("accumulated", 0, "batch 1 of iterator 'main' has other samples"),
        ("part in a step", 0, "the batch given to `compute_gradients` has other samples"),
        ("other iterator", 0, "the batch of iterator 'noise' has other samples (batch: float32 (4,) on both)"),
    ],
)
def test_other_batches_are_refused_before_anything_changes(
    outcomes: list[dict[str, Any]], program: str, updates: int, words: str
) -> None:
    for each in outcomes:
        found = each[program]
        assert (found["kind"], found["rank"]) == ("DisagreementError", 1), found
        begin = f"The batches of rank 1 must be those of rank 0, but in the update after {updates} others, "
        assert found["message"].startswith(begin)
        assert words in found["message"]
        assert CURE in found["message"]
        assert (found["updates"], found["unchanged"]) == (updates, True)


def test_so_are_batches_given_by_hand(outcomes: list[dict[str, Any]]) -> None:
    for each in outcomes:
        assert each["by hand"]["kind"] == "DisagreementError"
        assert "the batch given to `compute_gradients` has other samples" in each["by hand"]["message"]


def test_the_seed_of_an_iterator_is_named(outcomes: list[dict[str, Any]]) -> None:
    for each in outcomes:
        found = each["seed of an iterator"]
        assert found["kind"] == "DisagreementError"
        assert "`data_seed` is 1338, not 1337" in found["message"]


@pytest.mark.parametrize("program", ["sampler", "batch sampler", "sampler in a function"])
def test_a_distributed_sampler_is_refused_by_name(outcomes: list[dict[str, Any]], program: str) -> None:
    for each in outcomes:
        found = each[program]
        assert found["kind"] == "ValueError"
        assert "a DataLoader with a DistributedSampler (num_replicas=2)" in found["message"]
        assert "lockstep.BatchIterator(dataset, batch_size, shuffle=True)" in found["message"]


def test_a_model_in_distributed_data_parallel_is_refused_by_name(outcomes: list[dict[str, Any]]) -> None:
    for each in outcomes:
        found = each["wrapped model"]
        assert found["kind"] == "TypeError"
        assert "got a DistributedDataParallel." in found["message"]
        assert "`model.module`" in found["message"]


@pytest.mark.parametrize("program", ["same", "same samplers", "sampler of one"])
def test_the_same_batches_are_accepted(outcomes: list[dict[str, Any]], program: str) -> None:
    first, second = (each[program] for each in outcomes)
    assert first["kind"] == second["kind"] == "nothing", first
    assert first["updates"] == second["updates"] == 8
    assert first["end"] == second["end"]
