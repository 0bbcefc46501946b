"""The models of the checks. All are made of layers that have deterministic kernels on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Task:
    """A model for classification, and the shape of its inputs.

    Attributes:
        build: Creates the model.
        shape: The shape of one input.
        num_tokens: The number of different tokens; 0 if inputs are numbers.
        classes: The number of classes.
        optimizer: Creates the optimizer.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_tokens: int = 0
    classes: int = 10
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def model(self) -> nn.Module:
        """Build the model, always with the same weights."""
        torch.manual_seed(1)
        return self.build()

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw inputs and classes, one class per input or per token, on the CPU."""
        generator = torch.Generator().manual_seed(2)
        shape = (size, *self.shape)
        if self.num_tokens:
            inputs = torch.randint(self.num_tokens, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        targets = shape if self.num_tokens == self.classes else (size,)
        return inputs, torch.randint(self.classes, targets, generator=generator)


def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy in float32 of a model that may be held in half precision."""
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    return functional.cross_entropy(model(inputs).float().flatten(0, -2), target.flatten())


def mlp(width: int = 64) -> nn.Module:
    """Create an MLP with dropout."""
    return nn.Sequential(
        *(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.Mish(), nn.Linear(width, 10)),
    )


class Pooled(nn.Module):
    """Averages over two dimensions of images, with a deterministic backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average over height and width."""
        return x.mean((2, 3))


def convnet() -> nn.Module:
    """Create a convolutional network with BatchNorm and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32, momentum=None), nn.SiLU()),
        *(Pooled(), nn.Linear(32, 10)),
    )


class Attention(nn.Module):
    """An encoder layer with dropout over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify sequences of tokens."""
        logits: torch.Tensor = self.head(self.layer(self.embed(tokens)).mean(1))
        return logits


class Recurrent(nn.Module):
    """Two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify sequences of numbers."""
        logits: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class SparseEmbedding(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32, sparse=True)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify sequences of tokens."""
        logits: torch.Tensor = self.head(self.embed(tokens).mean(1))
        return logits


class Checkpointed(nn.Module):
    """A block with dropout, of which forward is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.SiLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify vectors."""
        logits: torch.Tensor = self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))
        return logits


def sgd(parameters: object, **options: float) -> torch.optim.Optimizer:
    """Create SGD, which takes sparse gradients."""
    return torch.optim.SGD(parameters, **options)


TASKS = {
    "MLP": Task(mlp, (32,)),
    "convnet": Task(convnet, (3, 16, 16)),
    "attention": Task(Attention, (12,), num_tokens=100),
    "LSTM": Task(Recurrent, (9, 16)),
    "sparse embedding": Task(SparseEmbedding, (12,), num_tokens=100, optimizer=sgd),
    "checkpointing": Task(Checkpointed, (32,)),
}
"""The models of `bits`."""


class Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the body and the shortcut, rectified."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """Create a network like ResNet-50, with strided convolutions instead of the pooling of the stem.

    References: He et al., "Deep Residual Learning for Image Recognition", 2015, arXiv:1512.03385, table 1.
    """
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
    ]
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, Pooled(), nn.Linear(inputs, 1000))


class Block(nn.Module):
    """A layer of a causal transformer, with normalization first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier tokens, then apply the MLP."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.second_norm(x))
        return result


class LanguageModel(nn.Module):
    """A causal transformer; by default of the shape of the smallest GPT-2, with 124 M parameters.

    References: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """

    def __init__(
        self, vocabulary: int = 50_257, length: int = 1024, width: int = 768, heads: int = 12, depth: int = 12
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.embed.weight)
