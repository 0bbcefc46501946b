"""The models and batches of the benchmarks of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

BATCH_SIZE = 256
NUM_BATCHES = 4  # different batches, which are used in turn


class Encoder(nn.Module):
    """A small transformer encoder over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify a batch of token sequences."""
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return logits


def tiny() -> nn.Module:
    """Create an MLP of 0.1 M parameters."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    """Create an MLP of 1.9 M parameters."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convnet() -> nn.Module:
    """Create three convolutions with BatchNorm for images of 32 x 32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


@dataclass(frozen=True)
class Workload:
    """A model and the distribution of its inputs."""

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], torch.Tensor]

    def batches(self, part: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Create the batches, or one part of each."""
        generator = torch.Generator().manual_seed(0)
        whole = [
            (self.inputs(generator), torch.randint(0, 10, (BATCH_SIZE,), generator=generator))
            for _ in range(NUM_BATCHES)
        ]
        # Every process draws the whole batches, so that the parts of all contenders are the same samples.
        return [(x[part].clone(), y[part].clone()) for x, y in whole]


def floats(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Return a function that draws inputs of normal numbers."""
    return lambda generator: torch.randn(BATCH_SIZE, *shape, generator=generator)


WORKLOADS: Mapping[str, Workload] = {
    "tiny": Workload(tiny, floats(784)),
    "mlp": Workload(mlp, floats(784)),
    "convnet": Workload(convnet, floats(3, 32, 32)),
    "encoder": Workload(Encoder, lambda generator: torch.randint(0, 512, (BATCH_SIZE, 32), generator=generator)),
}
