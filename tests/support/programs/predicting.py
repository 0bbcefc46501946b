"""Predictions as every process of a run makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from tests.support.programs.evaluating import Noisy


class Nested(nn.Module):
    """Returns several tensors, one of them half as long, and one value for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Noisy()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        logits = self.body(x)
        return {"logits": logits, "pair": (logits.argmax(1), [logits[:, :1]]), "mean": logits.mean()}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(29, 4, generator=generator), torch.arange(29) % 3)


def predict(devices: int, num_shards: int = 1, split: Any = "contiguous") -> list[Any]:
    """Predict alone and in a trainer, from a dataset and from batches; return everything as plain tensors."""
    torch.manual_seed(0)
    model, samples = Nested(), data()
    places = {"devices": ["cpu"] * devices, "num_shards": num_shards}
    found: list[Any] = [
        ls.predict(model, samples, batch_size=4, **places),
        ls.predict(model, DataLoader(samples, 4), **places),
        ls.predict(model, samples, batch_size=4, precision="bf16", output=lambda out: out["logits"], **places),
    ]
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        split=split,
        loss_fn=lambda replica, x, y: nn.functional.cross_entropy(replica(x)["logits"], y),
    )
    trainer = ls.Trainer(updater, until=(1, "iteration"))
    updater.update()
    found.append(trainer.predict(samples, batch_size=5, num_shards=num_shards))
    updater.update()
    found.append(ls.digest(model))
    updater.finalize()
    return found


def differing(_: Any) -> list[str]:
    """Predict with other weights, and with other data, on each rank; return the errors."""
    rank = ls.find_communicator().rank
    model = nn.Linear(4, 1)
    messages = []
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(float(rank))
    for given in (data(), [(torch.ones(2, 4) * rank,)] * 3):
        try:
            ls.predict(model, iter(given) if isinstance(given, list) else given, devices=1)
        except ls.LockstepError as error:
            messages.append(f"{type(error).__name__}: {error}")
        model.bias.data.zero_()
    return messages
