import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
batches = ls.BatchIterator(dataset, batch_size=16, shuffle=True, seed=0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
updater = ls.ParallelUpdater(
    batches,
    optimizer,
    model,
    devices=["cpu"],
    num_shards=4,
    loss_fn=ls.supervised(nn.functional.cross_entropy),
    accumulate=2,
    clip_grad_norm=1.0,
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/accelerate")
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.extend(ls.extensions.Snapshot(keep=5))
trainer.run(resume="auto")
