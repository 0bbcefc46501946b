"""A training run with evaluations of many kinds, as every process of it makes it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

import lockstep as ls
from lockstep import extensions as ex

NUM_SAMPLES = 29
NUM_CLASSES = 3


class Noisy(nn.Module):
    """Draws in evaluation too, and keeps statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(hidden + 0.1 * torch.randn_like(hidden))


class Decaying:
    """A metric of which two states cannot be merged."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.value = self.value * 0.5 + float(output.sum()) + len(target)

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.value = 1.0


class SquaredError:
    """A metric with a sum of floating-point numbers that can be merged."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.total += float((output - nn.functional.one_hot(target, NUM_CLASSES)).square().sum())
        self.count += len(target)

    def compute(self) -> float:
        return self.total / self.count

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def merge(self, states: Any) -> None:
        self.reset()
        for state in states:
            self.total, self.count = self.total + state["total"], self.count + state["count"]


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    """Return a loss whose weight is not the number of samples."""
    ls.report({"norm": x.norm()}, weight=float(len(x)))
    counted = y != 0
    loss = nn.functional.cross_entropy(model(x), y, reduction="none") * counted
    return ls.Loss(loss.sum() / counted.sum().clamp(min=1), weight=counted.sum(), metrics={"first": (x[0, 0], 1)})


def reporting(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Report a loss, and return none."""
    ls.report({"val_loss": nn.functional.cross_entropy(model(x), y)})


def data() -> torch.utils.data.TensorDataset:
    """Return the samples."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def torch_metrics() -> dict[str, Any]:
    """Return metrics of torchmetrics of each kind of state."""
    tm = __import__("torchmetrics")
    classification = tm.classification
    return {
        "set": tm.MetricCollection(
            {
                "accuracy": classification.MulticlassAccuracy(NUM_CLASSES, average="micro"),
                "recall": classification.MulticlassRecall(NUM_CLASSES),
                "precision": classification.MulticlassPrecision(NUM_CLASSES),
            }
        ),
        "f1": classification.MulticlassF1Score(NUM_CLASSES, average=None),
        "confusion": classification.MulticlassConfusionMatrix(NUM_CLASSES),
        "auroc": classification.MulticlassAUROC(NUM_CLASSES),
        "calibration": classification.MulticlassCalibrationError(NUM_CLASSES),
        "hinge": classification.MulticlassHingeLoss(NUM_CLASSES),
        "by_name": tm.ClasswiseWrapper(classification.MulticlassAccuracy(NUM_CLASSES, average=None)),
        "smallest": tm.wrappers.MinMaxMetric(classification.MulticlassAccuracy(NUM_CLASSES)),
    }


def evaluate(devices: int, *, evaluating: bool = True, num_shards: int | None = None) -> dict[str, Any]:
    """Train for two epochs with evaluations; return the log and the digest of the model."""
    torch.manual_seed(0)
    model = Noisy()
    samples = data()
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, 8, shuffle=True, last_batch="drop"),  # no shard of one sample for the norm
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=weighted,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = ls.Trainer(updater, until=(2, "epoch"), out=folder)
        if evaluating:
            own = {"accuracy": ls.metrics.Accuracy(), "decaying": Decaying(), "error": SquaredError()}
            batches = ls.BatchIterator(samples, 6, repeat=False)
            trainer.extend(ex.Evaluator(batches, own | torch_metrics(), loss_fn=weighted, num_shards=num_shards))
            loader = torch.utils.data.DataLoader(samples, 7)
            summed = ls.supervised(nn.CrossEntropyLoss(reduction="sum"))
            trainer.extend(ex.Evaluator(loader, loss_fn=summed), name="summed")
            trainer.extend(ex.Evaluator(loader, loss_fn=reporting), name="reporting")
            trainer.extend(ex.Evaluator(loader, {"accuracy": ls.metrics.Accuracy()}, model=Noisy()), name="other")
        trainer.extend(ex.LogReport())
        trainer.run()
        log = trainer.get_extension("LogReport")
    assert isinstance(log, ex.LogReport)
    entries = log.log
    for entry in entries:
        del entry["elapsed_time"]
    return {"log": entries, "digest": ls.digest(model), "modes": [each.training for each in model.modules()]}


def differing_batches(_: Any) -> str:
    """Evaluate other batches on each rank; return the error."""
    communicator = ls.find_communicator()
    x, y = data().tensors
    mine = [(x[:8] + communicator.rank, y[:8])]
    evaluator = ex.Evaluator(mine, {"accuracy": ls.metrics.Accuracy()}, model=Noisy())
    try:
        evaluator.evaluate(communicator=communicator)
    except ls.DisagreementError as error:
        return str(error)
    return "none"


def failing_rank(_: Any) -> str:
    """Fail on one rank; return the error of each."""
    communicator = ls.find_communicator()
    x, y = data().tensors

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if communicator.rank == 1:
            raise RuntimeError("the model broke")
        return nn.functional.cross_entropy(model(x), y)

    evaluator = ex.Evaluator([(x[:8], y[:8]), (x[8:], y[8:])], loss_fn=loss_fn, model=Noisy())
    try:
        evaluator.evaluate(communicator=communicator)
    except Exception as error:  # noqa: BLE001 - returned
        return f"{type(error).__name__}: {error}"
    return "none"
