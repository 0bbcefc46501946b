import torch
from torch import nn

from lockstep.compat.torch7 import DataParallelTable

torch.manual_seed(0)
inputs = torch.randn(96, 8)
labels = (inputs.sum(dim=1) > 0).long()

net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
criterion = nn.CrossEntropyLoss()

model = DataParallelTable(1, True)
model.add(net, ["cpu", "cpu"])
started: list[str] = []
model.threads(lambda: started.append("a thread"))

for _ in range(30):
    output = model.forward(inputs)
    scores = output.detach().requires_grad_()
    criterion(scores, labels).backward()
    model.zero_grad_parameters()
    model.backward(inputs, scores.grad)
    model.update_parameters(0.5)
model.release()
