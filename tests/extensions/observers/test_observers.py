"""Observed values: rates, norms of gradients, statistics of parameters, speed."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.communicators import Watch
from lockstep.extensions import GradientNorm, LogReport, ObserveLR, ObserveValue, ParameterStatistics, Throughput
from lockstep.extensions.observers.observe import _DeviceLoad
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
from lockstep.updaters.compute.clock import Clock
from tests.support.plain_updaters import CountingUpdater
from tests.support.resuming import vectors
from tests.support.runs import Placement, finalized, updater_for
from tests.support.workloads import MLP


def run(out: Path, *extensions: Any, devices: Any = 1, updates: int = 3, **options: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = options.pop("optimizer", torch.optim.SGD)(groups, lr=0.25)
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3)
    loss = ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=devices, num_shards=4, loss_fn=loss, **options)
    trainer = ls.Trainer(updater, (updates, "iteration"), out=out, extensions=extensions)
    trainer.run()
    return trainer


def gradient(trainer: Trainer) -> torch.Tensor:
    parameters = trainer.updater.get_all_models()["main"].parameters()
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


def test_learning_rates_of_all_groups_and_the_last_of_an_interval(tmp_path: Path) -> None:
    def halve(trainer: Trainer) -> None:
        for group in trainer.updater.get_optimizer("main").param_groups:
            group["lr"] /= 2

    log = LogReport(trigger=(3, "iteration"))
    run(tmp_path, ls.trainer.FunctionExtension(halve, priority=400), ObserveLR(), log)
    assert (log.log[0]["lr"], log.log[0]["group1/lr"]) == (0.5 / 8, 0.25 / 8)


def test_the_value_of_a_function(tmp_path: Path) -> None:
    trainer = run(tmp_path, ObserveValue("twice", lambda trainer: trainer.updater.iteration * 2))
    assert trainer.observation["twice"] == 6
    assert "ObserveValue(twice)" in repr(trainer)


def test_the_norm_is_that_of_the_whole_gradient_on_any_devices(tmp_path: Path) -> None:
    norms = set()
    for devices in (["cpu"], ["cpu"] * 2, ["cpu"] * 3):
        trainer = run(tmp_path, GradientNorm(), devices=devices)
        norms.add(float(trainer.observation["gradient_norm"]))  # type: ignore[arg-type]
        assert float(trainer.observation["gradient_norm"]) == pytest.approx(float(gradient(trainer).norm()))  # type: ignore[arg-type]
    assert len(norms) == 1


def test_the_largest_magnitude_and_a_loss_scale(tmp_path: Path) -> None:
    trainer = run(tmp_path, GradientNorm(math.inf), loss_scale=ls.StaticLossScale(1024.0))
    plain = run(tmp_path, GradientNorm(math.inf))
    assert float(trainer.observation["gradient_norm"]) == float(plain.observation["gradient_norm"])  # type: ignore[arg-type]
    assert float(plain.observation["gradient_norm"]) == float(gradient(plain).abs().max())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`norm_type` must be above 0, got 0"):
        GradientNorm(0)


def test_without_gradients_one_warning_says_so(tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(4), (3, "iteration"), tmp_path, extensions=[GradientNorm()])
    with pytest.warns(UserWarning, match="No model has gradients after an update") as warned:
        trainer.run()
    assert len(warned) == 1


def test_statistics_of_parameters_and_gradients(tmp_path: Path) -> None:
    trainer = run(tmp_path, ParameterStatistics(prefix="s/", trigger=(1, "iteration")))
    weight = trainer.updater.get_all_models()["main"].get_parameter("2.weight")
    assert weight.grad is not None
    values = weight.detach()
    found = {name: float(value) for name, value in trainer.observation.items() if name.startswith("s/2.weight/")}  # type: ignore[arg-type]
    assert found == {
        "s/2.weight/data/mean": float(values.mean()),
        "s/2.weight/data/std": float(values.std(correction=0)),
        "s/2.weight/data/min": float(values.min()),
        "s/2.weight/data/max": float(values.max()),
        "s/2.weight/data/zeros": 0.0,
        "s/2.weight/grad/mean": float(weight.grad.mean()),
        "s/2.weight/grad/std": float(weight.grad.std(correction=0)),
        "s/2.weight/grad/min": float(weight.grad.min()),
        "s/2.weight/grad/max": float(weight.grad.max()),
        "s/2.weight/grad/zeros": float((weight.grad == 0).double().mean()),
    }


def test_statistics_of_your_own(tmp_path: Path) -> None:
    extension = ParameterStatistics({"sum": torch.sum}, grads=False, trigger=(1, "iteration"))
    names = set(run(tmp_path, extension).observation)
    expected = {f"{layer}.{kind}/data/sum" for layer in (0, 2) for kind in ("weight", "bias")}
    assert {name for name in names if "/data/" in name or "/grad/" in name} == expected


def test_rates_are_counts_by_the_same_time(tmp_path: Path) -> None:
    losses = [Mean(torch.tensor(1.0), 3), Mean(1.0, 5), Mean(1.0, torch.tensor(4.0)), Mean(1.0, 4)]
    log = LogReport(trigger=(2, "iteration"))
    extensions = [Throughput(label="tokens", trigger=(2, "iteration")), log]
    Trainer(CountingUpdater(4, losses), (4, "iteration"), tmp_path, extensions=extensions).run()
    quotients = [entry["throughput/tokens"] / entry["throughput/updates"] for entry in log.log]
    assert quotients == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("label", ["samples", "tokens"])
def test_samples_are_counted_and_not_the_weights_of_the_loss(tmp_path: Path, label: str) -> None:
    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> ls.Loss:
        return ls.Loss(nn.functional.cross_entropy(model(inputs), target), weight=10 * len(target))

    log = LogReport(trigger=(4, "iteration"))
    with finalized(updater_for(MLP, Placement(1), num_shards=2, loss_fn=loss_fn)) as updater:
        Trainer(
            updater, (4, "iteration"), tmp_path, extensions=[Throughput(label=label, trigger=log.trigger), log]
        ).run()
        passed = updater.samples_passed
    (entry,) = log.log
    counts = {name: 4 * entry[f"throughput/{name}"] / entry["throughput/updates"] for name in ("samples", label)}
    assert counts == pytest.approx({"samples": passed} | ({"tokens": 10 * passed} if label == "tokens" else {}))


def step_by_parts(updater: ls.ParallelUpdater, batch: tuple[torch.Tensor, ...]) -> None:
    for part in (batch, tuple(each[:2] for each in updater.next_batch("main"))):
        updater.compute_gradients(part)
        updater.apply_gradients()


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (8, {"loss_fn": ls.supervised(nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0])))}),
        (8, {"loss_fn": ls.supervised(nn.CrossEntropyLoss(reduction="sum"))}),
        (24, {"accumulate": 3}),
        (16, {"step_fn": step_by_parts}),
    ],
)
def test_samples_of_a_data_loader_are_rows(tmp_path: Path, samples: int, options: dict[str, Any]) -> None:
    net, loader = nn.Linear(6, 3), DataLoader(vectors(), 8, drop_last=True)
    options = {"loss_fn": ls.supervised(functional.cross_entropy), **options}
    updater = ls.ParallelUpdater(
        loader, torch.optim.SGD(net.parameters(), lr=0.1), net, devices=1, num_shards=4, **options
    )
    log = LogReport(trigger=(2, "iteration"))
    trainer = Trainer(updater, (2, "iteration"), tmp_path, extensions=[Throughput(trigger=log.trigger), log])
    with finalized(updater):
        trainer.run()
    assert log.log[0]["throughput/samples"] / log.log[0]["throughput/updates"] == pytest.approx(samples)
    assert isinstance(trainer.result, ls.UpdateResult)
    assert trainer.result.num_samples == samples


def sleeping(place_seconds: dict[str, float]) -> Any:
    """Return a loss function that sleeps in the threads of devices."""

    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        name = threading.current_thread().name
        time.sleep(next((seconds for part, seconds in place_seconds.items() if part in name), 0.0))
        return nn.functional.cross_entropy(model(inputs), target)

    return loss_fn


def test_the_load_is_the_share_of_the_time_in_which_a_device_computes(tmp_path: Path) -> None:
    # The second device has a thread of its own, and waits for the first one.
    loss_fn = sleeping({"lockstep-1": 0.001, "MainThread": 0.03})
    log = LogReport(trigger=(3, "iteration"))
    twice = [Throughput(trigger=(3, "iteration")), Throughput(trigger=(2, "iteration")), log]
    with finalized(updater_for(MLP, Placement(2), num_shards=4, loss_fn=loss_fn)) as updater:
        Trainer(updater, (6, "iteration"), tmp_path, extensions=twice).run()
        assert updater.clock.num_users == 0
    for entry in log.log:
        first, second = (entry[f"throughput/load/device{index}"] for index in range(2))
        assert 0.0 < second < first <= 1.0
        assert entry["throughput/memory/cpu"] > 50 * 2**20


def test_a_single_measured_update_stands_for_an_interval_of_an_accelerator() -> None:
    clock = Clock(Watch(), [torch.device("meta")])
    load = _DeviceLoad(clock, (torch.device("meta"),))
    measured = []

    def compute(_: int) -> None:
        time.sleep(0.01)

    load.restart()
    for number in range(1, 4):
        run = clock.timed(compute)
        measured.append(run is not compute)
        run(0)
        load.end_update(number)
    assert measured == [False, True, False]
    (share,) = load.shares(1000.0)
    assert 0.00001 <= share < 1.0
    load.restart()
    load.end_update(1)
    assert load.shares(2.0) == []
    load.stop()
    assert clock.timed(compute) is compute


def test_a_rate_of_weights_that_nothing_observes_is_left_out(tmp_path: Path) -> None:
    log = LogReport(trigger=(1, "iteration"))
    extensions = [Throughput("main/gen/loss", label="tokens", trigger=(1, "iteration")), log]
    trainer = Trainer(CountingUpdater(4, [Mean(1.0, 3)] * 2), (2, "iteration"), tmp_path, extensions=extensions)
    message = "`weight_of` must name an observed mean, got 'main/gen/loss'.* observed: main/loss, throughput/updates"
    with pytest.warns(UserWarning, match=message) as warned:
        trainer.run()
    assert len(warned) == 1
    names = {"throughput/updates", "throughput/samples", "throughput/tokens"}
    assert [names & set(entry) for entry in log.log] == [{"throughput/updates"}] * 2
