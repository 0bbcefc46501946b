import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import lockstep as ls


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([1, 2 + index % 2, 4, 5]), "labels": index % 2}


def loss_fn(model, **batch):
    return model(**batch).loss


torch.manual_seed(0)
config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = ls.BatchIterator(Texts(), batch_size=16, shuffle=True, seed=0)
updater = ls.ParallelUpdater(
    batches,
    optimizer,
    model,
    devices=["cpu"],
    num_shards=4,
    loss_fn=loss_fn,
    clip_grad_norm=1.0,
    scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20),
)
trainer = ls.Trainer(updater, until=(5, "epoch"), out="runs/hf")
test_batches = ls.BatchIterator(Texts(), batch_size=16, repeat=False)
metrics = {"accuracy": ls.metrics.Accuracy()}
trainer.extend(
    ls.extensions.Evaluator(test_batches, metrics, loss_fn=loss_fn, output=lambda out: out.logits, target="labels")
)
trainer.extend(ls.extensions.LogReport())
trainer.extend(ls.extensions.PrintReport())
trainer.extend(ls.extensions.Snapshot())
trainer.run(resume="auto")
if trainer.is_main:
    model.save_pretrained("runs/hf/model")
