import torch
from ignite.engine import Events
from ignite.handlers import EMAHandler, ProgressBar
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
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/ignite-handlers")

average = EMAHandler(model, momentum=0.01)
bridge = ls.extensions.IgniteBridge(saved={"average": average.ema_model})
average.attach(bridge.engine)
ProgressBar().attach(bridge.engine, output_transform=lambda output: {"loss": output["loss"]})


@bridge.engine.on(Events.EPOCH_COMPLETED(every=2))
def report_epoch(engine):
    print("epoch", engine.state.epoch, "is completed")


trainer.extend(bridge)
trainer.run()
