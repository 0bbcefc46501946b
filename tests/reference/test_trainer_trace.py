"""Chainer's trainer: which extension is called when, what its log says, who is told of an error."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plain_updaters import CountingUpdater
from torch.utils.data import TensorDataset
from traces import Tolerance, equal, tensor

from lockstep.data import BatchIterator
from lockstep.extensions import LogReport
from lockstep.metrics import Mean
from lockstep.optim import CorrectedMomentumSGD
from lockstep.trainer import Extension, Trainer
from lockstep.updaters import ParallelUpdater, supervised

HERE = Path(__file__).resolve()
REFERENCE = Path(os.environ.get("LOCKSTEP_REFERENCE") or HERE.parents[2].parent / "shared" / "reference")
TRACE = REFERENCE / "chainer-cunn" / "traces" / "trainer.json"

if not TRACE.exists():
    pytest.skip(f"the reference traces are not at {TRACE}; set LOCKSTEP_REFERENCE", allow_module_level=True)

SHARED: dict[str, Any] = json.loads(TRACE.read_text())


def recorded(what: str) -> list[Any]:
    """List the cases that recorded this."""
    return [pytest.param(case, id=case["name"]) for case in SHARED["cases"] if what in case]


RUNS, FAILURES, SUMMARIES = recorded("per_iteration"), recorded("raised"), recorded("sequence")


class Tagged(Extension):
    def __init__(self, tag: str, events: list[list[Any]]) -> None:
        self.tag = tag
        self.events = events

    @property
    def name(self) -> str:
        return "e"

    def __call__(self, trainer: Trainer) -> None:
        self.events.append([self.tag, trainer.updater.iteration])


@pytest.mark.parametrize("case", RUNS)
def test_order_names_and_log_of_a_run(case: dict[str, Any], tmp_path: Path) -> None:
    seen = [step["observation"] for step in case["per_iteration"]]
    updater = CountingUpdater(
        per_epoch=len(tensor(SHARED["data"]["x"])) / case["batch_size"],
        losses=[step["main/loss"] for step in seen],
    )
    trainer = Trainer(updater, tuple(case["stop"]), tmp_path)
    trainer.extend(LogReport(last=()))  # Chainer averages the learning rate

    def observe_the_rest(trainer: Trainer) -> None:
        for key, value in seen[trainer.updater.iteration - 1].items():
            trainer.observe(key, value)

    trainer.extend(observe_the_rest, priority=1000)
    events: list[list[Any]] = []
    described = [one for one in case["extensions_in_registration_order"] if isinstance(one, dict)]
    for one in described:
        extension = Tagged(one["tag"], events)
        trainer.extend(extension, priority=one["priority"], trigger=tuple(one["trigger"]))
        assert trainer.name_of(extension) == one["name"]
    trainer.run()

    assert [event for event in events if event[1] <= 4] == case["extension_calls_first_4_iterations"]
    assert updater.iteration == case["iteration"]
    log = trainer.get_extension("LogReport")
    assert isinstance(log, LogReport)
    entries = [{key: entry[key] for key in expected} for entry, expected in zip(log.log, case["log"], strict=True)]
    # The mean of a few values: numpy's running sum there, the exact sum here.
    assert entries == [{key: pytest.approx(value, rel=1e-14) for key, value in one.items()} for one in case["log"]]


@pytest.mark.parametrize("case", RUNS)
def test_a_real_run_moves_the_weights_alike(case: dict[str, Any], tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(tensor(SHARED["init"]["l/W"]))
        model.bias.copy_(tensor(SHARED["init"]["l/b"]))
    shift = case["warmup_shift"]
    optimizer = CorrectedMomentumSGD(model.parameters(), lr=shift["warmup_start"], momentum=case["momentum"])
    data = TensorDataset(tensor(SHARED["data"]["x"]), tensor(SHARED["data"]["t"]))
    updater = ParallelUpdater(
        BatchIterator(data, case["batch_size"], last_batch="wrap"),
        optimizer,
        model,
        devices=["cpu"] * len(case["devices"] or ["main"]),
        split="strided",
        reduction="sum",
        loss_fn=supervised(torch.nn.functional.mse_loss),
    )
    trainer = Trainer(updater, tuple(case["stop"]), tmp_path)
    rates: list[tuple[float, float]] = []

    def warm_up(trainer: Trainer) -> None:
        before = optimizer.lr
        step = (shift["init"] - shift["warmup_start"]) / shift["warmup_iter"]
        optimizer.lr = shift["warmup_start"] + step * min(trainer.updater.iteration, shift["warmup_iter"])
        rates.append((before, optimizer.lr))

    trainer.extend(warm_up)
    trainer.run()
    told = [(step["observation"]["lr"], step["lr_after_extensions"]) for step in case["per_iteration"]]
    assert rates == [pytest.approx(pair, rel=1e-14) for pair in told]
    assert equal(case["final_param"]["l/W"], model.weight.detach(), Tolerance(1e-10))
    assert equal(case["final_param"]["l/b"], model.bias.detach(), Tolerance(1e-10))
    assert (optimizer.epoch, updater.iteration) == (case["optimizer_epoch"], case["iteration"])


@pytest.mark.parametrize("case", FAILURES)
def test_order_of_calls_when_an_update_fails(case: dict[str, Any], tmp_path: Path) -> None:
    kind, text = case["raised"]
    order: list[list[Any]] = []

    class Finalized(CountingUpdater):
        def finalize(self) -> None:
            order.append(["iterator", "finalize"])

    class Told(Extension):
        def __init__(self, name: str) -> None:
            self.own_name = name

        @property
        def name(self) -> str:
            return self.own_name

        def __call__(self, trainer: Trainer) -> None:
            order.append([self.name, "call", trainer.updater.iteration])

        def initialize(self, _: Trainer) -> None:
            order.append([self.name, "initialize"])

        def finalize(self, _: Trainer) -> None:
            order.append([self.name, "finalize"])

        def on_error(self, _: Trainer, error: BaseException) -> None:
            order.append([self.name, "on_error", type(error).__name__])

    trainer = Trainer(Finalized(fail_at=case["iteration"], error=RuntimeError(text)), (9, "iteration"), tmp_path)
    for name, priority in case["priorities"].items():
        before = name in case["call_before_training"]
        trainer.extend(Told(name), priority=priority, call_before_training=before)
    with pytest.raises(RuntimeError, match=text) as caught:
        trainer.run()
    assert type(caught.value).__name__ == kind
    assert order == case["order"]
    assert trainer.updater.iteration == case["iteration"]


@pytest.mark.parametrize("case", SUMMARIES)
def test_weighted_means(case: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(), (len(case["sequence"]), "iteration"), tmp_path)

    def observe(trainer: Trainer) -> None:
        for key, value in case["sequence"][trainer.updater.iteration - 1].items():
            if key == "skip":  # a list of numbers, which Chainer passes over: here it cannot be observed
                with pytest.raises(TypeError, match="An observed value must be a Mean, a number or a 0-d tensor"):
                    trainer.observe(key, value)
            else:
                trainer.observe(key, Mean(value[0] * value[1], value[1]) if isinstance(value, list) else value)

    trainer.extend(observe, priority=1000)
    report = LogReport(trigger=(len(case["sequence"]), "iteration"))
    trainer.extend(report)
    trainer.run()
    (entry,) = report.log
    # The mean of a few values: numpy's running sum there, the exact sum here.
    assert all(math.isclose(entry[key], mean, rel_tol=1e-14) for key, mean in case["mean"].items())


def test_every_case_is_replayed() -> None:
    replayed = [*RUNS, *FAILURES, *SUMMARIES, *recorded("results")]  # the last kind: test_refused_calls.py
    assert sorted(each.id for each in replayed) == sorted(case["name"] for case in SHARED["cases"])
    assert SHARED["variant"] != "dev" or list(map(len, (RUNS, FAILURES, SUMMARIES))) == [2, 1, 1]
