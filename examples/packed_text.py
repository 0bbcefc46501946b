"""Train a language model on documents that are packed into samples of one length, read from several files.

    python examples/packed_text.py                                  on two cores
    python examples/packed_text.py --devices cpu --workers 2        on one core: the same digest
    python examples/packed_text.py --check                          compare packed documents with single ones

The corpus is the help texts that come with Python. Their bytes are the tokens, and a further token ends each document.
Samples are cut from the tokens without padding, so a sample holds the end of one document, some others, and the
beginning of the last one. Attention is masked so that no token sees another document, and positions count from the
start of a document or sample: a document has the same outputs whichever others it is packed with.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import lockstep as ls
from lockstep.data import Parts, Tokens

END = 256  # the token that ends a document; 0..255 are bytes
CONTEXT = 128  # tokens that the model reads per sample
BATCH_SIZE = 16  # samples per update
NUM_SHARDS = 4  # per batch, so that up to 4 devices have work
NUM_SECTIONS = 8  # of the files, which are read side by side
NUM_FILES = 5
BLOCK = 64  # samples that are shuffled among themselves
WIDTH = 64  # the size of the representation of a token
HEADS = 4
LAYERS = 2
LR = 3e-3  # the learning rate of AdamW
IGNORED = -100  # the target of a token whose successor belongs to another document


def write_corpus(folder: Path) -> list[Path]:
    """Write the tokens of all documents to files of unequal lengths."""
    texts = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
    paths = []
    for file in range(NUM_FILES):
        tokens = np.concatenate([[*text, END] for text in texts[file::NUM_FILES]]).astype(np.uint16)
        paths.append(folder / f"topics-{file}.npy")
        np.save(paths[-1], tokens)
    return paths


def packed(window: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make a sample of consecutive tokens.

    Args:
        window: CONTEXT + 1 tokens.
    """
    tokens, target = window[:-1], window[1:].clone()
    ends = tokens == END
    # The token that ends a document still belongs to it.
    document = ends.cumsum(0) - ends.long()
    target[ends] = IGNORED
    first = torch.searchsorted(document, document)  # the position at which the document of each token begins
    return {"tokens": tokens, "document": document, "position": torch.arange(len(tokens)) - first, "target": target}


class Layer(nn.Module):
    """Attention within a document, and a network for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the next representation of each token.

        Args:
            hidden: The representations, (samples, tokens, WIDTH).
            mask: Which token sees which other one, (samples, 1, tokens, tokens).
        """
        parts = self.attend(self.norms[0](hidden)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        hidden = hidden + self.mix(seen.transpose(1, 2).flatten(2))
        return hidden + self.network(self.norms[1](hidden))


class Model(nn.Module):
    """A small transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(END + 1, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, END + 1))

    def forward(self, tokens: torch.Tensor, document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Compute the scores of each next token, (samples, tokens, END + 1)."""
        same = document.unsqueeze(2) == document.unsqueeze(1)
        mask = same.tril().unsqueeze(1)
        hidden = self.tokens(tokens) + self.positions(position)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)


def loss_fn(model: nn.Module, *, target: torch.Tensor, **inputs: torch.Tensor) -> ls.Loss:
    """Compute the mean loss over the tokens that have a successor, whose number is its weight."""
    scores = model(**inputs)
    return ls.Loss(F.cross_entropy(scores.flatten(0, 1), target.flatten()), weight=int((target != IGNORED).sum()))


def build(paths: list[Path], devices: list[str], workers: int) -> ls.ParallelUpdater:
    """Create the run."""
    torch.manual_seed(0)
    model = Model()
    files = [Tokens(path, CONTEXT + 1, stride=CONTEXT, block=BLOCK) for path in paths]
    dataset = Parts(files, num_sections=NUM_SECTIONS, transform=packed)
    batches = ls.BatchIterator(
        dataset, BATCH_SIZE, shuffle=True, last_batch="drop", num_workers=workers, sample_streams=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return ls.ParallelUpdater(batches, optimizer, model, devices=devices, num_shards=NUM_SHARDS, loss_fn=loss_fn)


@torch.no_grad()
def largest_difference(paths: list[Path]) -> float:
    """Return the largest difference between the scores of packed documents and those of each document alone."""
    torch.manual_seed(0)
    model = Model().double()
    tokens = torch.from_numpy(np.concatenate([np.load(path) for path in paths]).astype(np.int64))
    # The sample in which most documents end.
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT)
    sample = packed(windows[(windows == END).sum(1).argmax()])
    inputs = {name: value.unsqueeze(0) for name, value in sample.items() if name != "target"}
    together = model(**inputs)[0]
    differences = []
    for document in sample["document"].unique():
        mine = sample["document"] == document
        alone = model(**{name: value[:, mine] for name, value in inputs.items()})[0]
        differences.append((together[mine] - alone).abs().max())
    return float(max(differences))


def main() -> None:
    """Train the model, and print the loss at the beginning and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--workers", type=int, default=0, help="processes that read samples in advance")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--check", action="store_true", help="compare packed documents with single ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_corpus(Path(folder))
        if options.check:
            print(f"largest difference of a score: {largest_difference(paths):.1e}")
            return
        updater = build(paths, options.devices, options.workers)
        losses = [updater.update().loss for _ in range(options.updates)]
        updater.finalize()
    few = max(1, options.updates // 10)
    print(f"loss per token {sum(losses[:few]) / few:.3f} -> {sum(losses[-few:]) / few:.3f}")
    print(f"weights {ls.digest(updater.get_all_models()['main'])}")


if __name__ == "__main__":
    main()
