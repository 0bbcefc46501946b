from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
batches = ls.BatchIterator(dataset, batch_size=32, shuffle=True, seed=0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
updater = ls.ParallelUpdater(batches, optimizer, model, num_shards=4, loss_fn=ls.supervised(loss_fn))
rank = updater.communicator.rank
newest = max(Path("runs/ddp").glob("epoch-*"), default=None)
if newest is not None:
    ls.snapshots.restore(updater, newest)
total = torch.zeros(())
while updater.epoch < 5:
    total += updater.update().loss / len(batches)
    if updater.is_new_epoch:
        if rank == 0:
            print(updater.epoch, total.item())
        ls.snapshots.save(updater, f"runs/ddp/epoch-{updater.epoch:03}")
        total = torch.zeros(())
