"""Train a GPT-2 of Hugging Face from its configuration, with the exact mean loss over tokens of padded texts.

    python examples/libraries/transformers_tokens.py            on one CPU device
    python examples/libraries/transformers_tokens.py cpu cpu    on two: the same digest

The texts are the help topics that ship with Python. Their paragraphs differ in length, so the shards of a batch hold
different numbers of tokens. `lockstep.token_mean` weights each shard by its tokens.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep as ls

LENGTH = 96  # bytes of a paragraph that are used
PAD = 0
IGNORED = -100  # the label of padding, which counts in no loss


class Paragraphs(Dataset[dict[str, torch.Tensor]]):
    """The paragraphs of Python's help topics as bytes, padded to one length."""

    def __init__(self, count: int) -> None:
        found = [text.strip() for topic in sorted(topics) for text in topics[topic].split("\n\n")]
        self.texts = [text.encode()[:LENGTH] for text in found if len(text) > 8][:count]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(self.texts[index]))
        padding = LENGTH - len(ids)
        return {
            "input_ids": torch.nn.functional.pad(ids, (0, padding), value=PAD),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (0, padding)),
            "labels": torch.nn.functional.pad(ids, (0, padding), value=IGNORED),
        }


def main(devices: list[str]) -> None:
    """Train for two epochs, and print the digest of the weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(Paragraphs(256), batch_size=32, shuffle=True, seed=0),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model,
        devices=devices,
        num_shards=4,
        loss_fn=ls.token_mean(ignore_index=IGNORED),
        clip_grad_norm=1.0,
        seed=0,
    )
    trainer = ls.Trainer(updater, until=(2, "epoch"), out="runs/transformers")
    trainer.extend(ls.extensions.LogReport())
    trainer.extend(ls.extensions.PrintReport(["epoch", "main/loss"]))
    trainer.run()
    print(ls.digest(model))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
