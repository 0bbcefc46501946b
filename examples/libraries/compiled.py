"""Train a model that `torch.compile` compiles.

    python examples/libraries/compiled.py            on one CPU device
    python examples/libraries/compiled.py cpu cpu    on two: the same digest

Each device compiles its replica at the first update. Needs a C++ compiler. A compiled model has other bits than the
same model without a compiler, on any number of devices alike.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


def main(devices: list[str]) -> None:
    """Train for two epochs, and print the digest of the weights."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 32)
    dataset = TensorDataset(inputs, (inputs[:, :16].sum(dim=1) > inputs[:, 16:].sum(dim=1)).long())
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 2))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(dataset, batch_size=64, shuffle=True, seed=0),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        torch.compile(model),
        devices=devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        seed=0,
    )
    trainer = ls.Trainer(updater, until=(2, "epoch"), out="runs/compiled")
    trainer.extend(ls.extensions.LogReport())
    trainer.extend(ls.extensions.PrintReport(["epoch", "main/loss", "elapsed_time"]))
    trainer.run()
    print(ls.digest(model))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
