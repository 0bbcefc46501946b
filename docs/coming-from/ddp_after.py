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
loss_fn = ls.supervised(nn.CrossEntropyLoss())
updater = ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_fn)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/ddp")
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.run()
if trainer.is_main:
    torch.save(model.state_dict(), "runs/ddp/model.pt")
