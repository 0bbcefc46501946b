import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_index):
        features, labels = batch
        output = self.layers(features)
        self.log("accuracy", (output.argmax(dim=1) == labels).float().mean())
        return nn.functional.cross_entropy(output, labels)

    def validation_step(self, batch, batch_index):
        features, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(features), labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


lightning.seed_everything(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
loader, val_loader = DataLoader(dataset, 32, shuffle=True), DataLoader(dataset, 64)
model = Classifier()
optimizer = model.configure_optimizers()
updater = ls.ParallelUpdater(
    loader, optimizer, model, num_shards=4, clip_grad_norm=1.0, loss_fn=lambda net, *batch: net.training_step(batch, 0)
)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/lightning-module")
trainer.extend(ls.extensions.Evaluator(val_loader, loss_fn=lambda net, *batch: net.validation_step(batch, 0)))
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.extend(ls.extensions.Snapshot(keep=1, best="validation/main/val_loss", mode="min"))
trainer.run()
