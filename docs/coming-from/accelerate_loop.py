import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls

accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
loss_fn = ls.supervised(nn.functional.cross_entropy)
updater = ls.ParallelUpdater(
    loader, optimizer, model, num_shards=4, loss_fn=loss_fn, accumulate=2, clip_grad_norm=1.0, scheduler=schedule
)
for epoch in range(5):
    for _ in range(len(loader) // 2):
        loss = updater.update().loss
    accelerator.print(epoch, loss.item())
    ls.snapshots.save(updater, f"runs/accelerate-loop/{epoch}")
