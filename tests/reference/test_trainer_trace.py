"""Chainer's trainer: which extension is called when, what its log says, who is told of an error."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions import LogReport
from lockstep.metrics import Mean
from lockstep.trainer import Extension, Trainer
from small_updaters import CountingUpdater

HERE = Path(__file__).resolve()
REFERENCE = Path(os.environ.get("LOCKSTEP_REFERENCE") or HERE.parents[2].parent / "shared" / "reference")
TRACE = REFERENCE / "chainer-cunn" / "traces" / "trainer.json"

if not TRACE.exists():
    pytest.skip(f"the reference traces are not at {TRACE}; set LOCKSTEP_REFERENCE", allow_module_level=True)

CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(TRACE.read_text())["cases"]}
# The other two cases are no trainer's: refused_calls tries optimizers, iterators and converters, and
# dict_summary's weighted means are replayed below.
RUNS = [name for name in CASES if name.startswith("run/")]


class Tagged(Extension):
    def __init__(self, tag: str, events: list[list[Any]]) -> None:
        self.tag = tag
        self.events = events

    @property
    def name(self) -> str:
        return "e"

    def __call__(self, trainer: Trainer) -> None:
        self.events.append([self.tag, trainer.updater.iteration])


@pytest.mark.parametrize("name", RUNS)
def test_order_names_and_log_of_a_run(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    recorded = [step["observation"] for step in case["per_iteration"]]
    updater = CountingUpdater(
        per_epoch=10 / case["batch_size"], losses=[step["main/loss"] for step in recorded]
    )
    trainer = Trainer(updater, tuple(case["stop"]), tmp_path)
    trainer.extend(LogReport())

    def observe_the_rest(trainer: Trainer) -> None:
        for key, value in recorded[trainer.updater.iteration - 1].items():
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
    entries = [
        {key: entry[key] for key in expected} for entry, expected in zip(log.log, case["log"], strict=True)
    ]
    # The mean of a few values: numpy's running sum there, the exact sum here.
    assert entries == [
        {key: pytest.approx(value, rel=1e-14) for key, value in one.items()} for one in case["log"]
    ]


def test_order_of_calls_when_an_update_fails(tmp_path: Path) -> None:
    case = CASES["error_in_update"]
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

    trainer = Trainer(
        Finalized(fail_at=case["iteration"], error=RuntimeError(text)), (9, "iteration"), tmp_path
    )
    for name, priority in case["priorities"].items():
        before = name in case["call_before_training"]
        trainer.extend(Told(name), priority=priority, call_before_training=before)
    with pytest.raises(RuntimeError, match=text) as caught:
        trainer.run()
    assert type(caught.value).__name__ == kind
    assert order == case["order"]
    assert trainer.updater.iteration == case["iteration"]


def test_weighted_means(tmp_path: Path) -> None:
    case = CASES["dict_summary"]
    trainer = Trainer(CountingUpdater(), (len(case["sequence"]), "iteration"), tmp_path)

    def observe(trainer: Trainer) -> None:
        for key, value in case["sequence"][trainer.updater.iteration - 1].items():
            if key == "skip":  # a list of numbers, which Chainer passes over: here it cannot be observed
                with pytest.raises(
                    TypeError, match="An observed value must be a Mean, a number or a 0-d tensor"
                ):
                    trainer.observe(key, value)
            else:
                trainer.observe(
                    key, Mean(value[0] * value[1], value[1]) if isinstance(value, list) else value
                )

    trainer.extend(observe, priority=1000)
    report = LogReport(trigger=(len(case["sequence"]), "iteration"))
    trainer.extend(report)
    trainer.run()
    (entry,) = report.log
    assert all(math.isclose(entry[key], mean, rel_tol=1e-15) for key, mean in case["mean"].items())
