import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def training_step(model, features, labels):
    output = model.layers(features)
    ls.report({"accuracy": (output.argmax(dim=1) == labels).float().mean()})
    return nn.functional.cross_entropy(output, labels)


def validation_step(model, features, labels):
    return nn.functional.cross_entropy(model.layers(features), labels)


torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = ls.BatchIterator(dataset, batch_size=32, shuffle=True, seed=0)
updater = ls.ParallelUpdater(
    batches, optimizer, model, devices=["cpu"], num_shards=4, loss_fn=training_step, clip_grad_norm=1.0
)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/lightning")
test_batches = ls.BatchIterator(dataset, batch_size=64, repeat=False)
trainer.extend(ls.extensions.Evaluator(test_batches, loss_fn=validation_step))
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.extend(ls.extensions.Snapshot(keep=1, best="validation/main/loss", mode="min"))
trainer.run(resume="auto")
