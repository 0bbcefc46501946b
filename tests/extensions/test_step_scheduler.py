"""Schedules that step by an observed value: the learning rates of the plain loop, also over a resume and ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, SequentialLR

import lockstep as ls
from lockstep.extensions import Evaluator, Snapshot, StepScheduler
from lockstep.metrics import Mean
from lockstep.triggers import TriggerSpec
from tests.support.plain_updaters import CountingUpdater
from tests.support.ranks import launch_on_ranks

LOSSES = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]


class OneOptimizer(CountingUpdater):
    """Counts, and has an optimizer that a scheduler can change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def get_all_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"main": self.optimizer}

    @property
    def lr(self) -> float:
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "lr": self.lr}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.param_groups[0]["lr"] = state["lr"]
        super().load_state_dict({key: value for key, value in state.items() if key != "lr"})


def plateau(updater: OneOptimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(updater.optimizer, factor=0.5, patience=1)


def trainer_with(out: Path, until: int, rates: list[float], trigger: TriggerSpec = (1, "epoch")) -> ls.Trainer:
    updater = OneOptimizer(per_epoch=2, losses=LOSSES)
    trainer = ls.Trainer(updater, (until, "iteration"), out)
    trainer.extend(StepScheduler(plateau(updater), "main/loss", trigger=trigger))
    trainer.extend(lambda _: rates.append(updater.lr), name="note")
    return trainer


def expected_rates(every: int = 2) -> list[float]:
    """Step the scheduler by the mean of every interval, in a loop."""
    updater = OneOptimizer()
    scheduler, rates = plateau(updater), []
    for number in range(1, len(LOSSES) + 1):
        if number % every == 0:
            scheduler.step(sum(LOSSES[number - every : number]) / every)
        rates.append(updater.lr)
    return rates


@pytest.mark.parametrize("every", [1, 2, 3])
def test_it_steps_by_the_mean_since_the_last_step(tmp_path: Path, every: int) -> None:
    rates: list[float] = []
    trainer_with(tmp_path, len(LOSSES), rates, (every, "iteration")).run()
    assert rates == expected_rates(every)
    assert len(set(rates)) > 1


@pytest.mark.parametrize("at", range(1, 16))
def test_a_resume_changes_nothing(tmp_path: Path, at: int) -> None:
    rates: list[float] = []
    first = trainer_with(tmp_path, at, rates)
    first.run()
    second = trainer_with(tmp_path, len(LOSSES), rates)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.run()
    assert rates == expected_rates()


def test_without_a_value_it_steps_any_scheduler(tmp_path: Path) -> None:
    updater = OneOptimizer(per_epoch=2)
    trainer = ls.Trainer(updater, (3, "epoch"), tmp_path)
    trainer.extend(StepScheduler(ExponentialLR(updater.optimizer, 0.5)))
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        trainer.run()  # CountingUpdater never steps its optimizer
    assert updater.lr == 0.125


def test_what_is_refused(tmp_path: Path) -> None:
    updater = OneOptimizer()
    with pytest.raises(ValueError, match="`value` must name the observed value that a ReduceLROnPlateau is stepped by"):
        StepScheduler(plateau(updater))
    with pytest.raises(TypeError, match=r"`scheduler` must be a torch.optim.lr_scheduler.LRScheduler, got a SGD"):
        StepScheduler(updater.optimizer)  # type: ignore[arg-type]
    exponential = ExponentialLR(updater.optimizer, 0.5)
    for scheduler in (exponential, SequentialLR(updater.optimizer, [exponential], [])):
        with pytest.raises(ValueError, match=f"`value` must be None for a {type(scheduler).__name__}.*got 'main/loss'"):
            StepScheduler(scheduler, "main/loss")
    trainer = ls.Trainer(updater, (1, "epoch"), tmp_path)
    trainer.extend(StepScheduler(plateau(OneOptimizer()), "main/loss"))
    with pytest.raises(ValueError, match=r"`scheduler` must belong to an optimizer of the updater \(main\), got a Red"):
        trainer.run()
    twice = ls.Trainer(updater, (1, "epoch"), tmp_path)
    for _ in range(2):
        twice.extend(StepScheduler(exponential))
    with pytest.raises(ValueError, match="must be stepped by one StepScheduler, got a ExponentialLR that several"):
        twice.run()


def test_a_value_that_is_not_observed_is_named(tmp_path: Path) -> None:
    updater = OneOptimizer(losses=[Mean(1.0, 1.0)] * 4)
    trainer = ls.Trainer(updater, (1, "epoch"), tmp_path)
    trainer.extend(StepScheduler(plateau(updater), "validation/main/loss"))
    message = (
        "of StepScheduler, got 'validation/main/loss'. Values of this iteration: main/loss. A value of an Evaluator"
    )
    with pytest.raises(ValueError, match=message):
        trainer.run()


def train(out: str, devices: int) -> tuple[str, list[float]]:
    """Train by a plateau of the validation loss, and return the weights and the learning rate of every epoch."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, targets)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    loss_fn = ls.supervised(torch.nn.functional.cross_entropy)
    batches = ls.BatchIterator(data, 8, shuffle=True)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"] * devices, num_shards=4, loss_fn=loss_fn)
    trainer = ls.Trainer(updater, (8, "epoch"), out)
    trainer.extend(Evaluator(ls.BatchIterator(data, 8, repeat=False), loss_fn=loss_fn))
    trainer.extend(StepScheduler(ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "validation/main/loss"))
    rates: list[float] = []
    trainer.extend(lambda _: rates.append(optimizer.param_groups[0]["lr"]), name="note", trigger=(1, "epoch"))
    trainer.run()
    return ls.digest(model), rates


def test_an_evaluation_steers_all_devices_and_ranks_alike(tmp_path: Path) -> None:
    expected = train(str(tmp_path), 1)
    assert len(set(expected[1])) > 1
    assert train(str(tmp_path), 2) == expected
    assert launch_on_ranks(train, 2, str(tmp_path), 1) == [expected] * 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda each: ReduceLROnPlateau(each, factor=0.5, patience=5),
            r"got patience = 5 instead of 1\. Pass",
        ),
        (lambda each: ReduceLROnPlateau(each, factor=0.1, patience=1), r"got factor = 0\.1 instead of 0\.5"),
        (lambda each: ExponentialLR(each, 0.5), r"got the kind = 'ExponentialLR' instead of 'ReduceLROnPlateau'"),
    ],
)
def test_the_state_of_another_scheduler_is_refused(other: Any, message: str) -> None:
    updater = OneOptimizer()
    saved = StepScheduler(plateau(updater), "main/loss").state_dict()
    scheduler = other(updater.optimizer)
    extension = StepScheduler(scheduler, "main/loss" if isinstance(scheduler, ReduceLROnPlateau) else None)
    before = scheduler.state_dict()
    with pytest.raises(ls.StateError, match=message):
        extension.load_state_dict(json.loads(json.dumps(saved)))
    assert scheduler.state_dict() == before
    StepScheduler(plateau(updater), "main/loss").load_state_dict(json.loads(json.dumps(saved)))


@pytest.mark.parametrize("name", ["main", "other"])
@pytest.mark.parametrize("owner", ["a function", "an extension", "the updater", "the updater, in a list"])
def test_a_scheduler_that_no_snapshot_holds_is_named(owner: str, name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    updater = ls.ParallelUpdater(
        [(torch.ones(4, 2), torch.ones(4, 1))],
        {name: optimizer},
        model,
        devices=["cpu"],
        num_shards=2,
        loss_fn=ls.supervised(torch.nn.functional.mse_loss),
        scheduler={"the updater": {name: scheduler}, "the updater, in a list": [scheduler]}.get(owner),
    )
    trainer = ls.Trainer(updater, (2, "update"), tmp_path)
    if owner == "an extension":
        trainer.extend(StepScheduler(scheduler, trigger=(1, "update")))
    elif owner == "a function":
        trainer.extend(lambda _: scheduler.step(), name="step", trigger=(1, "update"))
    trainer.extend(Snapshot())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    found = [str(each.message) for each in caught if "learning rate scheduler" in str(each.message)]
    assert len(found) == (owner == "a function")
    assert optimizer.param_groups[0]["lr"] == 0.25
