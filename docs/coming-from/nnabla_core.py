import torch
from torch import nn

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(96, 8)
train = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

model = nn.Linear(8, 2)
updater = ls.ParallelUpdater(
    ls.BatchIterator(train, batch_size=32),
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    model,
    devices=["cpu"],
    loss_fn=ls.supervised(nn.functional.cross_entropy),
    precision="fp16",
    loss_scale=ls.DynamicLossScale(factor=2.0**16, interval=10),
    on_overflow="retry",  # the same batch with the same random streams, so no batch is lost
)
for _ in range(20):
    updater.update()
updater.finalize()
