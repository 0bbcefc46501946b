import torch
from torch import nn

import lockstep as ls
from lockstep.compat import chainer


class Classifier(nn.Module):
    """A network that returns its loss, as in Chainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), t)


torch.manual_seed(0)
inputs = torch.randn(96, 8)
train = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

model = Classifier()
optimizer = chainer.CorrectedMomentumSGD(lr=0.05, momentum=0.9)
optimizer.setup(model)
optimizer.add_hook(ls.optim.hooks.WeightDecay(1e-4))

batches = ls.BatchIterator(train, batch_size=32, shuffle=True, seed=0)
updater = chainer.ParallelUpdater(batches, optimizer, devices={"main": "cpu", "second": "cpu"}, loss_scale=128.0)

trainer = ls.Trainer(updater, (3, "epoch"), out="result")
trainer.extend(ls.extensions.LogReport())
trainer.run()
