"""Train a language model of characters on the English text that ships with Python, and let it write.

    python examples/libraries/character_model.py            on one CPU device
    python examples/libraries/character_model.py cpu cpu    on two: the same digest, and the same text

The text is that of Python's help topics. Needs no other library.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls

LENGTH = 64


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text, each with the same piece one character later as its target."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self.data = torch.tensor([self.characters.index(character) for character in text])

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * LENGTH
        return self.data[start : start + LENGTH], self.data[start + 1 : start + LENGTH + 1]


class Model(nn.Module):
    """An embedding, an LSTM and a classifier of the next character."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(128, num_characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next character after each position."""
        hidden, _ = self.lstm(self.embedding(text))
        return self.last(self.dropout(hidden))


@torch.no_grad()
def write(model: nn.Module, characters: list[str], start: str, count: int) -> str:
    """Continue a text by drawing one character after another."""
    generator = torch.Generator().manual_seed(0)
    text = start
    for _ in range(count):
        ids = torch.tensor([[characters.index(character) for character in text[-LENGTH:]]])
        scores = model(ids)[0, -1] / 0.7
        text += characters[int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator))]
    return text


def main(devices: list[str]) -> None:
    """Train for four epochs, and print a text and the digest of the weights."""
    torch.manual_seed(0)
    dataset = Text("\n\n".join(topics[name] for name in sorted(topics))[:120_000])
    model = Model(len(dataset.characters))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(dataset, batch_size=32, shuffle=True, seed=0),
        torch.optim.Adam(model.parameters(), lr=5e-3),
        model,
        devices=devices,
        num_shards=4,
        loss_fn=ls.token_mean(),
        clip_grad_norm=1.0,
        seed=0,
    )
    trainer = ls.Trainer(updater, until=(4, "epoch"), out="runs/characters")
    trainer.extend(ls.extensions.LogReport())
    trainer.extend(ls.extensions.PrintReport(["epoch", "main/loss"]))
    trainer.run()
    model.eval()
    print(write(model, dataset.characters, start="The ", count=160))
    print(ls.digest(model))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
