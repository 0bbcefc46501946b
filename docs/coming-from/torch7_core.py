import torch
from torch import nn

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(96, 8)
labels = (inputs.sum(dim=1) > 0).long()

net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
model = ls.DataParallel(net, devices=["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for _ in range(30):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
model.release()
