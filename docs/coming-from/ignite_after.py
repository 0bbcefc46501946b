import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = ls.supervised(nn.CrossEntropyLoss())
batches = ls.BatchIterator(dataset, batch_size=32, shuffle=True, seed=0)
updater = ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_fn)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/ignite")
test_batches = ls.BatchIterator(dataset, batch_size=64, repeat=False)
trainer.extend(ls.extensions.Evaluator(test_batches, {"accuracy": ls.metrics.Accuracy()}, loss_fn=loss_fn))
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.extend(ls.extensions.Snapshot())


def report_epoch(trainer):
    if trainer.is_main:
        print("epoch", trainer.updater.epoch, "is completed")


trainer.extend(report_epoch, trigger=(1, "epoch"))
trainer.run(resume="auto")
