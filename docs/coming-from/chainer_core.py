import torch
from torch import nn

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(96, 8)
train = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
# Twice the learning rate: the gradient is a mean over the batch, and not a sum over two devices.
optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer.add_hook(ls.optim.hooks.WeightDecay(0.5e-4))

updater = ls.ParallelUpdater(
    ls.BatchIterator(train, batch_size=32, shuffle=True, seed=0),
    optimizer,
    model,
    devices=["cpu", "cpu"],
    num_shards=8,
    loss_fn=ls.supervised(nn.functional.cross_entropy),
    loss_scale=128.0,
)

trainer = ls.Trainer(updater, (3, "epoch"), out="result")
trainer.extend(ls.extensions.LogReport())
trainer.run()
