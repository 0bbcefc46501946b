import torch
from torch import nn

from lockstep.compat.mxnet import DataBatch, DataDesc, DataParallelExecutorGroup


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 2)

    def forward(self, data: torch.Tensor, softmax_label: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.fc(data)
        return scores if softmax_label is None else nn.functional.cross_entropy(scores, softmax_label)


torch.manual_seed(0)
inputs = torch.randn(96, 8)
labels = (inputs.sum(dim=1) > 0).long()

model = Net()
group = DataParallelExecutorGroup(
    model,
    ["cpu", "cpu"],
    [2, 1],
    [DataDesc("data", (48, 8))],
    [DataDesc("softmax_label", (48,))],
    ["fc.weight", "fc.bias"],
    for_training=True,
    inputs_need_grad=False,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for _ in range(10):
    for x, y in zip(inputs.split(48), labels.split(48), strict=True):
        group.forward(DataBatch([x], [y]))
        group.backward()
        optimizer.step()
group.core.close()
