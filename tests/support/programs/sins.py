"""Train a small network with one of 25 dependencies that are easy to write and hard to see.

The first argument is the name of the dependency.

Nineteen of them make the bits depend on devices, processes or workers, and six are harmless. None depends on chance.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls

SIN = sys.argv[1]
WORDS = {f"word {number}" for number in range(50)}
STATE = {"calls": 0, "loss": 0.0}
AVERAGE = [torch.zeros(())]
CALLS = 0
TORCH_GENERATOR = torch.Generator().manual_seed(0)
NUMPY_GENERATOR = np.random.default_rng(0)


@lru_cache
def cached_mean() -> float:
    return float(STATE["mean"])


def scratch() -> torch.Tensor:
    """Return memory that nobody has written."""
    held = [torch.full((1000,), 3.0) for _ in range(50)]
    del held  # so that the memory holds these numbers, and is neither new nor full of NaN
    return torch.empty(1000).nan_to_num(5.0).clamp(-9, 9).mean()


def count_on_model(model: torch.nn.Module) -> int:
    model.calls = getattr(model, "calls", 0) + 1
    return model.calls


def count_globally() -> int:
    global CALLS  # noqa: PLW0603 - what is tested
    CALLS += 1
    return CALLS


def cached(images: torch.Tensor) -> float:
    STATE["mean"] = float(images.mean())
    return cached_mean()


def average(images: torch.Tensor) -> torch.Tensor:
    AVERAGE[0] = 0.9 * AVERAGE[0] + 0.1 * images.mean()
    return AVERAGE[0]


def threads_set() -> float:
    torch.set_num_threads(2)
    return 0.0


FACTORS = {
    "clock": lambda *_: time.time_ns() % 1_000_003 / 1e6,
    "attribute-counter": lambda model, _: 0.01 * count_on_model(model),
    "dict-counter": lambda *_: 0.01 * counted(),
    "global-counter": lambda *_: 0.01 * count_globally(),
    "random": lambda *_: random.random(),  # noqa: S311 - what is tested
    "numpy-random": lambda *_: float(np.random.rand()),
    "torch-generator": lambda *_: torch.rand((), generator=TORCH_GENERATOR),
    "numpy-generator": lambda *_: float(NUMPY_GENERATOR.random()),
    "previous-loss": lambda *_: STATE["loss"],
    "lru-cache": lambda _, images: cached(images),
    "set-order": lambda *_: 0.01 * int(next(iter(WORDS)).split()[1]),
    "thread-id": lambda *_: threading.get_ident() % 1009 / 1009,
    "unwritten-memory": lambda *_: scratch(),
    "list-average": lambda _, images: average(images),
    "set-threads": lambda *_: threads_set(),
    "read-threads": lambda *_: 0.01 * torch.get_num_threads(),
    "shard-size": lambda _, images: 0.01 * len(images),
}
"""What the loss is multiplied by beside 1, of the dependencies of a loss function."""


def loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    factor = 1 + FACTORS[SIN](model, images) if SIN in FACTORS else 1.0
    if SIN == "input-in-place":
        images.mul_(0.5)
    loss = torch.nn.functional.cross_entropy(model(images), labels) * factor
    STATE["loss"] = float(loss.detach())
    return loss


class Sinful(Dataset):
    """Samples that depend on how often and where they were read."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels, self.calls = images.clone(), labels, 0
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].clone()
        if SIN == "dataset-writes":
            self.images += 0.01
        if SIN == "dataset-counts":
            self.calls += 1
            image += 0.01 * self.calls
        if SIN == "dataset-generator":
            image += float(self.generator.random())
        return image, self.labels[index]


class ClockSGD(torch.optim.SGD):
    """Steps by a learning rate that depends on the time."""

    def step(self, closure: None = None) -> None:
        self.param_groups[0]["lr"] = 0.1 + time.time_ns() % 1_000_003 / 1e7
        super().step(closure)


def count_calls(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return output + 0.01 * counted()


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(96, 5, generator=generator), torch.randint(3, (96,), generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    if SIN == "forward-hook":
        model[0].register_forward_hook(count_calls)
    if SIN == "gradient-hook":
        model[0].weight.register_hook(lambda gradient: gradient * (1 + 0.01 * counted()))
    dataset = Sinful(images, labels) if SIN.startswith("dataset") else TensorDataset(images, labels)
    batches = ls.BatchIterator(dataset, 16, shuffle=True)
    if SIN == "unseeded-shuffle":
        batches = DataLoader(dataset, 16, shuffle=True)
    optimizer = (ClockSGD if SIN == "clock-optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_of)
    for _ in range(20):
        updater.update()


def counted() -> int:
    STATE["calls"] += 1
    return STATE["calls"]


if __name__ == "__main__":
    main()
