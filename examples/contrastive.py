"""Learn what a digit looks like without its label, by a loss over every pair of images in the whole batch.

    python examples/contrastive.py                        on two cores
    python examples/contrastive.py --devices cpu          on one: the same digest
    python examples/contrastive.py --check                the gradient of any split, against one device

Each image is changed at random in two ways, and a network learns to tell which two of all changed images
come from one (SimCLR: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations",
2020, arXiv:2002.05709, section 2.1). Such a loss is no mean over samples, so gradients of parts of a batch do
not add up to that of the whole: a device that saw its own images alone would compare them with fewer others.
Hence two stages. The encoder, which is the expensive one, is a `DataParallel`: its outputs are put together.
The loss, which is cheap, compares all of them in one place, and its gradient goes back to every device.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import lockstep as ls

BATCH_SIZE = 128  # images an update; twice as many after both changes
NUM_SHARDS = 4  # parts of a batch: up to 4 devices have work
FEATURES = 64  # numbers that stand for an image
PROJECTED = 32  # numbers by which images are compared while learning
TEMPERATURE = 0.1  # of the softmax over similarities
LR = 4e-3  # of Adam
JITTER = 0.1  # how far an entry of an image's affine map may be from the identity's; 1 is half an image
NOISE = 0.05  # standard deviation of what is added to grey levels 0..1
NUM_TEST = 360  # images to measure by, which are not learnt from


class Encoder(nn.Module):
    """Give features of an image, and a projection by which images are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, FEATURES, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * FEATURES, FEATURES),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, PROJECTED))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute both for a batch of images."""
        features = self.body(images)
        return {"features": features, "projected": self.head(features)}


def contrastive_loss(projected: torch.Tensor) -> torch.Tensor:
    """Tell for each of 2n images which other one is its pair, by cosine similarity (NT-Xent).

    Args:
        projected: Image i and image n + i are a pair.
    """
    unit = F.normalize(projected, dim=1)
    similarities = unit @ unit.T / TEMPERATURE
    similarities = similarities.masked_fill(torch.eye(len(unit), dtype=torch.bool, device=unit.device), -torch.inf)
    return F.cross_entropy(similarities, torch.arange(len(unit), device=unit.device).roll(len(unit) // 2))


def changed(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift, turn and shear each image a little, and add noise."""
    maps = torch.eye(2, 3) + JITTER * torch.randn(len(images), 2, 3, generator=generator)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return F.grid_sample(images, grid, align_corners=False) + noise


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Give 1,797 images of 8 x 8 pixels, in an order of their own, and what they show."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # grey levels 0..16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(digits.target)[order]


def build(devices: list[str]) -> ls.DataParallel:
    """Put the encoder on devices."""
    torch.manual_seed(0)
    return ls.DataParallel(Encoder(), devices, num_shards=NUM_SHARDS)


def train(encoder: ls.DataParallel, images: torch.Tensor, epochs: int) -> list[float]:
    """Learn from images; give the mean loss of each epoch."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        total = torch.zeros(())
        batches = torch.randperm(len(images), generator=generator).split(BATCH_SIZE)
        for batch in batches:
            pairs = torch.cat([changed(images[batch], generator) for _ in range(2)])
            optimizer.zero_grad()
            loss = contrastive_loss(encoder(pairs)["projected"])  # all pairs of the whole batch
            loss.backward()  # on all devices
            optimizer.step()
            total += loss.detach().cpu()
        losses.append(float(total) / len(batches))
    return losses


@torch.no_grad()
def pair_accuracy(encoder: nn.Module, images: torch.Tensor) -> float:
    """Say how often a changed image is most similar to the same one changed otherwise, among all of these."""
    generator = torch.Generator().manual_seed(1)
    one, other = (F.normalize(encoder(changed(images, generator))["projected"].cpu(), dim=1) for _ in range(2))
    return float(((one @ other.T).argmax(dim=1) == torch.arange(len(images))).float().mean())


@torch.no_grad()
def neighbour_accuracy(encoder: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Say how often the most similar image that was learnt from shows the same digit."""
    unit = F.normalize(encoder(images)["features"].cpu(), dim=1)
    nearest = (unit[:NUM_TEST] @ unit[NUM_TEST:].T).argmax(dim=1)
    return float((labels[NUM_TEST:][nearest] == labels[:NUM_TEST]).float().mean())


def gradient(encoder: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Give the gradient of the loss, all parameters in one tensor."""
    encoder.zero_grad()
    contrastive_loss(encoder(images)["projected"]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()])


def largest_error(images: torch.Tensor) -> float:
    """Compare the gradients of several splits with that of the bare encoder, in float64; relative."""
    torch.manual_seed(0)
    bare = Encoder().double()
    expected = gradient(bare, images.double())
    splits = [[1, 1], [5, 1], [1, 2, 3], [3, 1, 4, 1, 5]]
    errors = []
    for workloads in splits:
        net = ls.DataParallel(copy.deepcopy(bare), ["cpu"] * len(workloads), workloads=workloads)
        errors.append((gradient(net, images.double()) - expected).norm() / expected.norm())
    return float(max(errors))


def main() -> None:
    """Learn, and say how alike images of one digit have become."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare gradients with those of one device")
    options = parser.parse_args()
    images, labels = load_images()
    if options.check:
        print(f"largest relative error of a gradient: {largest_error(images[:64]):.1e}")
        return
    encoder = build(options.devices)
    unlearnt = pair_accuracy(encoder, images[:NUM_TEST]), neighbour_accuracy(encoder, images, labels)
    losses = train(encoder, images[NUM_TEST:], options.epochs)
    learnt = pair_accuracy(encoder, images[:NUM_TEST]), neighbour_accuracy(encoder, images, labels)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"finds its pair among {NUM_TEST} new images: {unlearnt[0]:.1%} -> {learnt[0]:.1%}")
    print(f"nearest image shows the same digit: {unlearnt[1]:.1%} -> {learnt[1]:.1%}")
    print(f"weights {ls.digest(encoder)}")


if __name__ == "__main__":
    main()
