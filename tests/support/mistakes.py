"""Honest mistakes: what is written by people who know other libraries, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy as ce
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils import data as torch_data

import lockstep

ls: Any = lockstep  # untyped, because what a type checker refuses is what is tried here
ext, met, trig = ls.extensions, ls.metrics, ls.triggers
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
DATA = torch_data.TensorDataset(X, Y)
DICTS = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def net() -> nn.Module:
    return nn.Linear(4, 2)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def batches(dataset: Any = DATA, **options: Any) -> Any:
    return ls.BatchIterator(dataset, **{"batch_size": 6, **options})


def build(kind: Any = ls.ParallelUpdater, **options: Any) -> Any:
    model = options.pop("model", None) or net()
    optimizer = options.pop("optimizer", None) or sgd
    optimizer = optimizer(model) if optimizer in (sgd, adam) else optimizer
    iterator = options.pop("iterator", None)
    iterator = batches() if iterator is None else iterator
    defaults = {"devices": ["cpu"], "num_shards": 2, "loss_fn": ls.supervised(ce)}
    return kind(iterator, optimizer, model, **defaults | options)


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters())


def configured_by_lightning(model: nn.Module) -> dict[str, Any]:
    optimizer = sgd(model)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "epoch"}}


def train(updates: int = 1, **options: Any) -> None:
    updater = build(**options)
    try:
        for _ in range(updates):
            updater.update()
    finally:
        updater.finalize()


def run(
    *extensions: Any, until: Any = (2, "epoch"), resume: Any = None, accept: Any = (), out: Any = "x", **given: Any
) -> None:
    trainer = ls.Trainer(build(**given), until, out)
    for each in extensions:
        trainer.extend(each)
    trainer.run(resume=resume, accept=accept)


def resumed(*, accept: Any = (), **changed: Any) -> None:
    run(ext.Snapshot(), until=(1, "epoch"))
    run(ext.Snapshot(), resume="auto", accept=accept, **changed)


def twice(*, resume: Any = None) -> None:
    for _ in range(2):
        run(ext.Snapshot(), until=(1, "epoch"), resume=resume)


def trainer(**options: Any) -> Any:
    return ls.Trainer(build(), **options)


def loss_with_backward(model: Any, x: Any, y: Any) -> Any:
    loss = ce(model(x), y)
    loss.backward()
    return loss


def loss_of_batch(model: Any, batch: Any) -> Any:
    return ce(model(batch[0]), batch[1])


def loss_that_scales(scaler: Any) -> Any:
    return lambda model, x, y: scaler.scale(ce(model(x), y))


def loss_of_outer_model() -> None:
    model = net()
    train(model=model, loss_fn=lambda _, x, y: ce(model(x), y))


def loss_that_steps() -> None:
    model = net()
    optimizer = sgd(model)

    def loss_fn(replica: Any, x: Any, y: Any) -> Any:
        optimizer.step()
        return ce(replica(x), y)

    train(2, model=model, optimizer=optimizer, loss_fn=loss_fn, num_shards=1)


def loss_that_changes_options(*, scheduled: bool) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 100)

    def by_hand(replica: Any, x: Any, y: Any) -> Any:
        optimizer.param_groups[0]["lr"] *= 1.1
        return ce(replica(x), y)

    def by_scheduler(replica: Any, x: Any, y: Any) -> Any:
        scheduler.step()
        return ce(replica(x), y)

    train(model=model, optimizer=optimizer, loss_fn=by_scheduler if scheduled else by_hand)


class WithoutTargets(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return X[index]


class Ragged(WithoutTargets):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(index + 1), 0


class Texts(WithoutTargets):
    def __getitem__(self, index: int) -> Any:
        return X[index], "cat"


class Stream(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def own_optimizer_step() -> None:
    model = net()
    optimizer = sgd(model)
    updater = build(model=model, optimizer=optimizer)
    for _ in range(2):
        updater.update()
        optimizer.step()


class StepByLoss(SGD):
    def step(self, loss: Any) -> None:  # type: ignore[override]  # noqa: ARG002 - on purpose
        super().step()


class StepByClosure(SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]  # on purpose
        self.param_groups[0]["lr"] = 0.1 * float(closure())
        super().step()


def step_by(kind: Any, **options: Any) -> None:
    model = net()
    train(model=model, optimizer=kind(model.parameters()), **options)


def own_step_after_compute_gradients() -> None:
    model = net()
    optimizer = sgd(model)
    updater = build(model=model, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        updater.compute_gradients((X, Y))
        optimizer.step()


def moved_by_hand(*, applies: bool, moves: bool = True) -> None:
    model = net()
    updater = build(model=model)
    for _ in range(4):
        for _ in range(2 if applies else 1):
            updater.compute_gradients((X, Y))
            for each in model.parameters():
                each.data -= 0.1 * each.grad * moves
            model.zero_grad()
        if applies:
            updater.compute_gradients((X, Y))
            updater.apply_gradients()


def replaced_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    updater = build(model=model)
    updater.update()
    model[1] = nn.Linear(4, 2)
    updater.update()


def snapshots_twice() -> None:
    trainer = ls.Trainer(build(), (1, "epoch"), "x")
    trainer.extend(ext.Snapshot(), name="newest")
    trainer.extend(ext.Snapshot(best="main/loss", mode="min"), name="best")
    trainer.run()


def file_for_a_folder() -> None:
    Path("x").touch()
    run()


def report_of_two_arguments() -> None:
    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        ls.report("accuracy", 1.0)
        return ce(model(x), y)

    train(loss_fn=loss_fn)


def own_scheduler_step() -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1)
    updater = build(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in range(3):
        updater.update()
        scheduler.step()


def two_ways_to_step() -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1)
    run(ext.StepScheduler(scheduler), model=model, optimizer=optimizer, scheduler=scheduler)


def own_backward() -> None:
    model = net()
    updater = build(model=model)
    ce(model(X), Y).backward()
    updater.update()


def set_on(target: Any, name: str, value: object) -> None:
    setattr(target, name, value)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def same_extension_twice() -> None:
    log = ext.LogReport()
    run(log, log)


def table(*columns: str) -> None:
    evaluator = ext.Evaluator(batches(repeat=False), {"accuracy": met.Accuracy()})
    run(ext.LogReport(), evaluator, ext.PrintReport(columns[0] if len(columns) == 1 else list(columns)))


def evaluate(iterator: Any, **options: Any) -> None:
    run(ext.Evaluator(iterator, **{"metrics": {"a": met.Accuracy()}, **options}))


def best_of(name: str) -> None:
    trainer = ls.Trainer(build(), (2, "epoch"), "x")
    trainer.extend(ext.LogReport(), trigger=trig.MinValue(name))
    trainer.run()
