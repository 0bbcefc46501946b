"""Stop in the middle of an epoch of a shuffling StatefulDataLoader of torchdata, and resume with the same bits.

python examples/libraries/stateful_dataloader.py            on one CPU device
python examples/libraries/stateful_dataloader.py cpu cpu    resumed on two: the same digest
"""

from __future__ import annotations

import shutil
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lockstep as ls

OUT = "runs/stateful"


def make_trainer(until: int, devices: list[str], out: str = OUT) -> tuple[ls.Trainer, nn.Module]:
    """Create a trainer that writes a snapshot every three updates."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = StatefulDataLoader(dataset, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    updater = ls.ParallelUpdater(
        loader,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        model,
        devices=devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.mse_loss),
        seed=0,
    )
    trainer = ls.Trainer(updater, until=(until, "iteration"), out=out)
    trainer.extend(ls.extensions.Snapshot(), trigger=(3, "iteration"))
    return trainer, model


def main(devices: list[str]) -> None:
    """Train for 5 updates, resume up to 20, and compare with a run that was not stopped."""
    for folder in (OUT, f"{OUT}-whole"):
        shutil.rmtree(folder, ignore_errors=True)
    make_trainer(5, ["cpu"])[0].run(resume="auto")
    trainer, resumed = make_trainer(20, devices)
    trainer.run(resume="auto")  # an epoch has 8 updates
    trainer, whole = make_trainer(20, ["cpu"], f"{OUT}-whole")
    trainer.run()
    if ls.digest(resumed) != ls.digest(whole):
        sys.exit("The resumed run has other weights.")
    print(ls.digest(resumed))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
