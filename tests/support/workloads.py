"""Small models of the usual kinds, with data to train them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

NUM_SAMPLES = 23
"""With batches of 9 an epoch is 9 + 9 + 5 samples, and 5 and 6 shards cut all of these unevenly."""


@dataclass(frozen=True)
class Workload:
    """A model and samples of what it is trained on.

    Attributes:
        name: As the test's name shows it.
        build: Makes the model from the default generator.
        shape: Of one input.
        vocabulary: How many different tokens; 0 where inputs are numbers.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0

    def model(self) -> nn.Module:
        """Build the model, always with the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)  # `torch.manual_seed` notes a whole stack for devices not in use
            return self.build()

    def data(self, num_samples: int = NUM_SAMPLES) -> TensorDataset:
        """Draw inputs and classes."""
        generator = torch.Generator().manual_seed(2)
        shape = (num_samples, *self.shape)
        inputs = (
            torch.randint(self.vocabulary, shape, generator=generator)
            if self.vocabulary
            else torch.randn(shape, generator=generator)
        )
        return TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[..., Workload], tuple[Any, ...]]:
        """Let another process find those of this file by name: some are built by lambdas, which cannot be pickled."""
        if any(each is self for each in globals().values()):
            return _named, (self.name,)
        return Workload, (self.name, self.build, self.shape, self.vocabulary)


def _named(name: str) -> Workload:
    return next(each for each in globals().values() if isinstance(each, Workload) and each.name == name)


class Transformer(nn.Module):
    """One encoder layer, with dropout in the attention's kernel and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


class Attention(nn.Module):
    """Attention with dropout by `torch.nn.MultiheadAttention`, which makes the weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, need_weights=True)
        return self.head(attended.mean(1))


class Recurrent(nn.Module):
    """Two LSTM layers with dropout between them, drawn inside the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Checkpointed(nn.Module):
    """A block with dropout whose forward is run again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(6, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.SiLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant)
        return self.head(hidden)


class Noisy(nn.Module):
    """Draws in its own code, by a random activation and from a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(16, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x + 0.1 * torch.rand(x.shape) + 0.1 * torch.randn_like(x))
        noise = torch.distributions.Normal(hidden, 0.1).rsample()
        gate = torch.distributions.Bernoulli(0.7).sample(hidden.shape)
        return self.head(functional.gumbel_softmax(noise * gate))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 24),
        nn.ReLU(),
        nn.Linear(24, 16),
        nn.Mish(),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6, momentum=None),
        nn.SiLU(),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def _wide() -> nn.Module:
    """More parameters than one thread sums up alone, in tensors that slices cut within."""
    return nn.Sequential(
        nn.Linear(6, 611),
        nn.Tanh(),
        nn.Linear(611, 701),
        nn.LayerNorm(701),
        nn.Dropout(0.1),
        nn.Linear(701, 3),
    )


MLP = Workload("mlp", _mlp, (6,))
CONVNET = Workload("convnet", _convnet, (1, 8, 8))
TRANSFORMER = Workload("transformer", Transformer, (6,), vocabulary=17)
ATTENTION = Workload("attention", Attention, (4, 8))
RECURRENT = Workload("lstm", Recurrent, (4, 5))
CHECKPOINTED = Workload("checkpoint", lambda: Checkpointed(use_reentrant=False), (6,))
REENTRANT = Workload("reentrant checkpoint", lambda: Checkpointed(use_reentrant=True), (6,))
NOISY = Workload("noisy", Noisy, (6,))
WIDE = Workload("wide", _wide, (6,))
