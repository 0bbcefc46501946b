"""Quotients of sums, however the values are distributed over updates, and with a resume anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lockstep as ls
from lockstep.extensions import LogReport, MicroAverage
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
from tests.support.plain_updaters import CountingUpdater
from tests.support.runs import finalized

CORRECT = [3.0, 1.0, 4.0, 1.0, 5.0]
ALL = [4.0, 2.0, 8.0, 1.0, 6.0]


def build(out: Path, updates: int = 5) -> tuple[Trainer, LogReport]:
    losses = [Mean(number, 1) for number in CORRECT]
    trainer = Trainer(CountingUpdater(4, losses), (updates, "iteration"), out)
    trainer.extend(lambda each: each.observe("all", ALL[each.updater.iteration - 1]), name="all", priority=300)
    trainer.extend(MicroAverage("main/loss", "all", "accuracy", trigger=(2, "iteration")))
    log = LogReport(["accuracy"], trigger=(1, "iteration"))
    trainer.extend(log)
    return trainer, log


def values(log: LogReport) -> list[float]:
    return [entry["accuracy"] for entry in log.log if "accuracy" in entry]


def test_the_sum_of_one_divided_by_the_sum_of_the_other(tmp_path: Path) -> None:
    trainer, log = build(tmp_path)
    trainer.run()
    assert values(log) == [4 / 6, 5 / 9]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_observes_the_same(tmp_path: Path, stop: int) -> None:
    first, _ = build(tmp_path, stop)
    first.run()
    state = json.loads(json.dumps(first.state_dict()))
    resumed, log = build(tmp_path)
    resumed.load_state_dict(state)
    resumed.run()
    assert values(log) == [4 / 6, 5 / 9]


def reporting(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, counted = net(x), y >= 0
    right = (logits.argmax(2) == y).sum()
    ls.report({"correct": right / len(x), "tokens": counted.sum() / len(x)})
    return torch.nn.functional.cross_entropy(logits.mT, y, reduction="none").sum(1).mean()


@pytest.mark.parametrize("num_shards", [1, 4])
def test_reported_means_over_samples_have_the_quotient_of_all_tokens(tmp_path: Path, num_shards: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for size in (11, 7):
        x, y = torch.randn(size, 5, 6, generator=generator), torch.randint(3, (size, 5), generator=generator)
        batches.append((x, torch.where(torch.arange(size)[:, None] % 4 < torch.arange(5), -100, y)))
    net = torch.nn.Linear(6, 3)
    updater = ls.ParallelUpdater(
        batches, torch.optim.SGD(net.parameters(), lr=0.0), net, devices=2, num_shards=num_shards, loss_fn=reporting
    )
    average = MicroAverage("main/correct", "main/tokens", "accuracy")
    trainer = Trainer(updater, (1, "epoch"), tmp_path, extensions=[average])
    with finalized(updater):
        trainer.run()
    right = sum(int((net(x).argmax(2) == y).sum()) for x, y in batches)
    # The means are float32 numbers.
    expected = right / sum(int((y >= 0).sum()) for _, y in batches)
    assert float(trainer.observation["accuracy"]) == pytest.approx(expected, rel=1e-6)


def test_without_values_nothing_is_observed(tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(4, [1.0] * 4), (4, "iteration"), tmp_path)
    trainer.extend(MicroAverage("main/loss", "absent", "accuracy", trigger=(2, "iteration")))
    trainer.run()
    assert "accuracy" not in trainer.observation
