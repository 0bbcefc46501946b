from itertools import cycle

import torch
from torch import nn

from lockstep.compat.nnabla import DynamicLossScalingUpdater

torch.manual_seed(0)
inputs = torch.randn(96, 8)
labels = (inputs.sum(dim=1) > 0).long()
batches = cycle(zip(inputs.split(32), labels.split(32), strict=True))
batch = next(batches)
model = nn.Linear(8, 2)


def feed() -> None:
    global batch
    batch = next(batches)


def loss() -> torch.Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.functional.cross_entropy(model(x), y)


solver = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
updater = DynamicLossScalingUpdater(solver, loss, feed, scale=2.0**16, N=10)
for _ in range(20):
    updater.update()
