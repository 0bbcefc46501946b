import torch
from torch import nn

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(96, 8)
labels = (inputs.sum(dim=1) > 0).long()

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

with ls.ReplicaGroup(model, devices=["cpu", "cpu"], workloads=[2, 1]) as group:
    for _ in range(10):
        for x, y in zip(inputs.split(48), labels.split(48), strict=True):
            scores = group.forward(x).requires_grad_()
            nn.functional.cross_entropy(scores, y).backward()
            group.backward(scores.grad)
            optimizer.step()
