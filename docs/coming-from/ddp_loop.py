from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
updater = ls.ParallelUpdater(loader, optimizer, model, num_shards=4, loss_fn=ls.supervised(loss_fn))
rank = updater.communicator.rank
for epoch in range(5):
    total = torch.zeros(())
    for features, labels in loader:
        updater.compute_gradients((features, labels))
        total += updater.apply_gradients().loss / len(loader)
    if rank == 0:
        print(epoch, total.item())
if rank == 0:
    Path("runs/ddp").mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), "runs/ddp/model.pt")
