"""Evaluate with a collection of torchmetrics: accuracy, F1 per class and a confusion matrix, on all devices.

python examples/libraries/torchmetrics_collection.py            on one CPU device
python examples/libraries/torchmetrics_collection.py cpu cpu    on two: the same numbers
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

import lockstep as ls

CLASSES = 3


def clusters(count: int, seed: int) -> TensorDataset:
    """Return points around one centre for each class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centres = torch.tensor([[0.0, 1.5], [1.5, 0.0], [-1.0, -1.0]])
    return TensorDataset(centres[labels] + torch.randn(count, 2, generator=generator), labels)


def main(devices: list[str]) -> None:
    """Train for five epochs, print the metrics of each, and the digest of the weights and metrics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(clusters(600, seed=0), batch_size=50, shuffle=True, seed=0),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        devices=devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
            "f1": MulticlassF1Score(CLASSES, average=None),
            "confusion": MulticlassConfusionMatrix(CLASSES),
        }
    )
    trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/torchmetrics")
    evaluator = ls.extensions.Evaluator(ls.BatchIterator(clusters(300, seed=1), 50, repeat=False), {"test": metrics})
    trainer.extend(evaluator)
    trainer.extend(ls.extensions.LogReport())
    names = [f"validation/main/test/{name}" for name in ("accuracy", "f1/class0", "f1/class1", "f1/class2")]
    trainer.extend(ls.extensions.PrintReport(["epoch", *names]))
    trainer.run()
    print(evaluator.results["test"]["confusion"].tolist())
    print(ls.digest(model))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
