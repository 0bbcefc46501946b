"""The models and the data of the recipes: small ones of every kind that an updater treats specially."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls

NUM_SAMPLES = 29  # with batches of 11, an epoch has 11 + 11 + 7 samples, which few numbers of shards divide evenly
NUM_CLASSES = 4
NUM_WORDS = 19
FEATURES = 7


class Reader(nn.Module):
    """A transformer encoder over tokens, with dropout inside and outside of the attention kernel."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 12, sparse=sparse)
        self.block = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.15, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(12)
        self.classes = nn.Linear(12, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify token sequences."""
        logits: torch.Tensor = self.classes(self.norm(self.block(self.words(tokens))).amax(1))
        return logits


class BagOfWords(nn.Module):
    """A model with sparse embeddings, most of whose rows have no gradient in an update."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 6, sparse=True)
        self.pairs = nn.EmbeddingBag(NUM_WORDS, 6, mode="sum", sparse=True)
        self.classes = nn.Linear(6, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify token sequences."""
        logits: torch.Tensor = self.classes(self.words(tokens).mean(1) + self.pairs(tokens))
        return logits


class Recurrent(nn.Module):
    """A GRU over the features of a sample, with dropout inside of its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 9, num_layers=2, dropout=0.25, batch_first=True)
        self.classes = nn.Linear(9, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify from the last step."""
        logits: torch.Tensor = self.classes(self.gru(x.unsqueeze(2))[0][:, -1])
        return logits


class Recomputed(nn.Module):
    """Two blocks with dropout under activation checkpointing, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 14)
        self.first = nn.Sequential(nn.Linear(14, 14), nn.Dropout(0.3), nn.ELU())
        self.second = nn.Sequential(nn.Dropout(0.2), nn.Linear(14, 14), nn.Tanh())
        self.classes = nn.Linear(14, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify."""
        # The dropout of the second forward must draw the same numbers as that of the first.
        hidden = checkpoint(self.first, self.stem(x), use_reentrant=False)
        logits: torch.Tensor = self.classes(checkpoint(self.second, hidden, use_reentrant=True))
        return logits


class Noisy(nn.Module):
    """A model that draws random numbers in its forward, and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 13), nn.RReLU(), nn.Linear(13, NUM_CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify with noise."""
        self.calls += 1
        # Distributions call other random operators than the functions of torch.
        kept = torch.distributions.Bernoulli(0.8).sample(x.shape)
        logits: torch.Tensor = self.body((x + 0.05 * torch.randn_like(x)) * kept)
        return logits


class OwnLoss(nn.Module):
    """A model that takes a dict and returns its loss; one weight is used twice, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.unused = nn.Parameter(torch.ones(3))
        self.classes = nn.Linear(FEATURES, NUM_CLASSES, bias=False)
        self.again = nn.Linear(FEATURES, NUM_CLASSES)
        # A tied weight gets the sum of two gradients.
        self.again.weight = self.classes.weight

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        hidden = self.inner(x).relu()
        return nn.functional.cross_entropy(self.classes(hidden) + self.again(x), target)


class InDtype(nn.Module):
    """A model in a given dtype, whose inputs are converted."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the model."""
        return self.model(x.to(self.dtype))  # type: ignore[no-any-return]  # a module's result has no type


def perceptron() -> nn.Module:
    """Create three layers with dropout."""
    return nn.Sequential(
        *(nn.Linear(FEATURES, 20), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(20, 15), nn.Softplus(), nn.Linear(15, NUM_CLASSES)),
    )


def images() -> nn.Module:
    """Create convolutions with both kinds of batch statistics, for images of 1 x 4 x 7."""
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.LeakyReLU()),
        *(nn.Conv2d(5, 6, 3, stride=2), nn.BatchNorm2d(6, momentum=None), nn.Dropout2d(0.1)),
        *(nn.Flatten(), nn.Linear(18, NUM_CLASSES)),
    )


def lazy() -> nn.Module:
    """Create layers that get their shapes from the first batch."""
    return nn.Sequential(
        *(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.1)), nn.LazyLinear(NUM_CLASSES)
    )


def wide() -> nn.Module:
    """Create a model with more parameters than one thread sums, or one control message contains."""
    return nn.Sequential(
        *(nn.Linear(FEATURES, 523), nn.Tanh(), nn.Linear(523, 811), nn.Dropout(0.1), nn.ReLU()),
        nn.Linear(811, NUM_CLASSES),
    )


def split_inside() -> nn.Module:
    """Create a network with a part that splits its batch again."""
    part = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(
        nn.Linear(FEATURES, 12),
        ls.DataParallel(part, devices=["cpu", "cpu"], num_shards=3),
        nn.Linear(12, NUM_CLASSES),
    )


def frozen_stem() -> nn.Module:
    """Create a model whose first layer is frozen, with a hook on one of its parameters."""
    model = perceptron()
    model[0].requires_grad_(False)
    model[3].weight.register_hook(_halved)
    return model


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def half(build: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return a function that creates a model in a dtype."""
    return lambda: InDtype(build(), dtype)


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Create a model, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return build()


class DictSamples(torch.utils.data.Dataset[Mapping[str, torch.Tensor]]):
    """A dataset whose samples are dicts."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        x, target = self.data[index]
        return {"x": x, "target": target}


def normal_samples(*shape: int) -> Callable[[], TensorDataset]:
    """Return a function that draws samples of normal numbers, and classes."""

    def draw() -> TensorDataset:
        generator = torch.Generator().manual_seed(12)
        return TensorDataset(torch.randn(NUM_SAMPLES, *shape, generator=generator), _classes(generator))

    return draw


vectors = normal_samples(FEATURES)
pixels = normal_samples(1, 4, 7)


def sentences() -> TensorDataset:
    """Draw sequences of tokens, and classes."""
    generator = torch.Generator().manual_seed(13)
    tokens = torch.randint(NUM_WORDS, (NUM_SAMPLES, 5), generator=generator)
    return TensorDataset(tokens, _classes(generator))


def dicts() -> DictSamples:
    """Draw samples as dicts."""
    return DictSamples(vectors())


def _classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
