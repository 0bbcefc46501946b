"""Another number of batches per update in each epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.resuming import log_lines
from tests.support.runs import ONE, Placement, cross_entropy, finalized, state_digest, updater_for
from tests.support.workloads import MLP, TRANSFORMER

SCHEDULE = {0: 3, 1: 1, 3: 2}
"""Epochs have 3 batches each: of 9, 9 and 5 samples."""


def by_function(epoch: int) -> int:
    return 3 if epoch < 1 else 1 if epoch < 3 else 2


def weights(accumulate: Any, updates: int = 10, **options: Any) -> list[float]:
    with finalized(updater_for(MLP, num_shards=2, accumulate=accumulate, **options)) as updater:
        return [updater.update().weight for _ in range(updates)]


@pytest.mark.parametrize("schedule", [SCHEDULE, by_function, {3: 2, 1: 1, 0: 3}])
def test_each_epoch_has_its_number(schedule: Any) -> None:
    #        epoch 0 | 1       | 2       | 3 .. 4
    assert weights(schedule) == [23, 9, 9, 5, 9, 9, 5, 18, 14, 14]


def test_before_the_first_epoch_that_is_named_there_is_one_batch() -> None:
    assert weights({1: 3}, updates=5) == [9, 9, 5, 23, 23]


def test_the_number_is_that_of_the_epoch_in_which_an_update_begins() -> None:
    # The second update begins with the last batch of epoch 0.
    assert weights({0: 2, 1: 1}, updates=4) == [18, 5 + 9, 9, 5]


def test_a_loop_of_updaters_with_fixed_numbers_gives_the_same_bits() -> None:
    """The mean is over all samples of an update, and dropout is that of the update and the shard."""
    with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate={0: 3, 1: 2})) as updater:
        for _ in range(5):
            updater.update()
        expected = state_digest(updater)
    with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate=3)) as first:
        first.update()
        state = first.state_dict()
    # From an epoch that is never reached on 3, so that streams are as far apart.
    with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate={0: 2, 99: 3})) as second:
        second.load_state_dict(state)
        for _ in range(4):
            second.update()
        assert state_digest(second) == expected
    with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate=2)) as other:
        other.load_state_dict(state)
        for _ in range(4):
            other.update()
        assert state_digest(other) != expected


@pytest.mark.parametrize("schedule", [pytest.param(SCHEDULE, marks=pytest.mark.slow), by_function])
def test_placements_and_resumed_runs_have_the_same_bits(schedule: Any) -> None:
    found = set()
    for placement in (ONE, Placement(2), Placement(3, (1, 2, 5))):
        with finalized(updater_for(TRANSFORMER, placement, num_shards=3, accumulate=schedule)) as updater:
            for _ in range(9):
                updater.update()
            found.add(state_digest(updater))
    for stop in range(9) if schedule is SCHEDULE else (1, 5):
        with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate=schedule)) as updater:
            for _ in range(stop):
                updater.update()
            state = updater.state_dict()
        with finalized(updater_for(TRANSFORMER, num_shards=3, accumulate=schedule)) as updater:
            updater.load_state_dict(state)
            for _ in range(9 - stop):
                updater.update()
            found.add(state_digest(updater))
    assert len(found) == 1


WITHIN_EPOCHS = {0: 2, 1: 3, 3: 1}
"""The second update begins in epoch 0 and ends in epoch 1, and so does the third with epoch 2."""


def evaluated(
    communicator: ls.Communicator, out: str, num_devices: int, updates: int, resume: str | None
) -> tuple[str, list[int]]:
    """Run with evaluations at the ends of epochs, and return the digest and the epoch after each update."""
    options: dict[str, Any] = {"num_shards": 3, "accumulate": WITHIN_EPOCHS, "communicator": communicator}
    with finalized(updater_for(TRANSFORMER, Placement(num_devices), **options)) as updater:
        trainer = ls.Trainer(updater, (updates, "update"), out=out)
        held_out = ls.BatchIterator(TRANSFORMER.data(10), 4, repeat=False)
        trainer.extend(
            ls.extensions.Evaluator(held_out, {"accuracy": ls.metrics.Accuracy()}, loss_fn=cross_entropy),
            trigger=(1, "epoch"),
        )
        trainer.extend(ls.extensions.LogReport(trigger=(1, "epoch")))
        trainer.extend(ls.extensions.Snapshot(trigger=(1, "update"), digest_every=1))
        seen: list[int] = []
        trainer.extend(lambda each: seen.append(each.updater.epoch))
        trainer.run(resume=resume)
        return state_digest(updater), seen


@pytest.mark.slow
def test_evaluations_and_resumed_runs_on_other_ranks_have_the_same_bits(tmp_path: Path) -> None:
    alone = ls.LocalCommunicator()
    expected, epochs = evaluated(alone, str(tmp_path / "whole"), 1, 9, None)
    assert epochs == [0, 1, 2, 3, 3, 4, 4, 4, 5]
    lines = log_lines(tmp_path / "whole")
    assert [line["iteration"] for line in lines if "validation/main/accuracy" in line] == [2, 3, 4, 6, 9]
    # Stopped in the middle of an epoch, and after each kind of update; the log of an interval goes on as well.
    for stop in (1, 2, 3, 5):
        out = tmp_path / str(stop)
        evaluated(alone, str(out), 2, stop, None)
        assert [digest for digest, _ in run_on_ranks(evaluated, 2, str(out), 1, 9, "auto")] == [expected] * 2
        assert log_lines(out) == lines
    out = tmp_path / "ranks"
    assert run_on_ranks(evaluated, 2, str(out), 2, 3, None)[0][0] != expected
    assert evaluated(alone, str(out), 3, 9, "auto")[0] == expected
    assert log_lines(out) == lines


def test_a_data_loader_counts_epochs_too() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(MLP.data(23), batch_size=9)

    model = MLP.model()
    updater = ls.ParallelUpdater(
        loader(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=1,
        loss_fn=cross_entropy,
        accumulate=SCHEDULE,
    )
    with finalized(updater):
        assert [updater.update().weight for _ in range(8)] == [23, 9, 9, 5, 9, 9, 5, 18]


def test_the_recipe_has_the_schedule() -> None:
    for schedule, described in ((SCHEDULE, {"0": 3, "1": 1, "3": 2}), (by_function, "by_function"), (4, 4)):
        with finalized(updater_for(MLP, num_shards=2, accumulate=schedule)) as updater:
            assert updater.recipe_fields()["accumulate"] == described


@pytest.mark.parametrize(
    ("accumulate", "error", "message"),
    [
        (0, ValueError, "`accumulate` must be at least 1, got 0"),
        (True, TypeError, "`accumulate` must be an integer, got True"),
        ("2", TypeError, "`accumulate` must be an integer, a dict .* or a function of the epoch, got '2'"),
        ({}, ValueError, "`accumulate` must name at least one epoch, got an empty mapping"),
        ({0: 0}, ValueError, r"`accumulate\[0\]` must be at least 1, got 0"),
        ({-1: 2}, ValueError, "`epoch in accumulate` must be at least 0, got -1"),
        ({"0": 2}, TypeError, "`epoch in accumulate` must be an integer, got '0'"),
        (lambda _: 2.0, TypeError, r"`accumulate\(0\)` must be an integer, got 2.0"),
        (lambda _: 0, ValueError, r"`accumulate\(0\)` must be at least 1, got 0"),
        (
            lambda _: 257,
            ValueError,
            r"`accumulate\(0\)` must be at most 256, got 257. Pass larger numbers in a mapping",
        ),
    ],
)
def test_what_is_no_number_of_batches_is_refused_at_once(accumulate: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        updater_for(MLP, num_shards=2, accumulate=accumulate)


def test_a_number_that_turns_out_wrong_changes_nothing() -> None:
    given: Callable[[int], int] = lambda epoch: 3 if epoch == 0 else 0  # noqa: E731 - as a user writes it
    with finalized(updater_for(MLP, num_shards=2, accumulate=given)) as updater:
        updater.update()
        before = state_digest(updater)
        with pytest.raises(ValueError, match=r"`accumulate\(1\)` must be at least 1, got 0"):
            updater.update()
        assert (updater.iteration, state_digest(updater)) == (1, before)


@pytest.mark.parametrize("accumulate", [2, {0: 1}, by_function])
def test_step_functions_take_one_batch(accumulate: Any) -> None:
    with pytest.raises(ValueError, match="`accumulate` must be 1 with a step function"):
        updater_for(MLP, num_shards=2, accumulate=accumulate, step_fn=print)
