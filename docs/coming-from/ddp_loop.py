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
loss_fn = ls.supervised(nn.CrossEntropyLoss())
updater = ls.ParallelUpdater(loader, optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_fn)
rank = ls.find_communicator().rank
for epoch in range(5):
    total = torch.zeros(())
    for features, labels in loader:
        updater.compute_gradients((features, labels))
        result = updater.apply_gradients()
        total += result.loss / len(loader)
    if rank == 0:
        print(epoch, total.item())
updater.finalize()
