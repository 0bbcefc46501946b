"""Train an encoder of handwritten digits without labels, with a loss over all pairs of images in the whole batch.

    python examples/contrastive.py                        on two cores
    python examples/contrastive.py --devices cpu          on one core: the same digest
    python examples/contrastive.py --check                compare gradients of several splits with one device

Each image is augmented at random in two ways, and the network learns which two of all augmented images come from
the same one (SimCLR: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations",
2020, arXiv:2002.05709, section 2.1). Such a loss is not a mean over samples, so the gradients of parts of a batch
do not add up to that of the whole batch: a device with only its own images would compare them with fewer others.
There are therefore two stages. The encoder, which is expensive, is a `DataParallel` that merges its outputs. The
loss, which is cheap, compares all outputs on one device, and its gradient flows back to every device.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import lockstep as ls

BATCH_SIZE = 128  # images per update; twice as many after augmentation
NUM_SHARDS = 4  # per batch, so that up to 4 devices have work
FEATURES = 64  # the size of the representation of an image
PROJECTED = 32  # the size of the projection that the loss compares
TEMPERATURE = 0.1  # of the softmax over similarities
LR = 4e-3  # the learning rate of Adam
JITTER = 0.1  # the standard deviation of the entries of an image's affine map; 1 is half an image
NOISE = 0.05  # the standard deviation of the noise added to gray levels 0..1
NUM_TEST = 360  # images for evaluation, which are not used for training


class Encoder(nn.Module):
    """A convolutional encoder with a projection head for the loss."""

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
        """Compute the features and the projections of a batch of images."""
        features = self.body(images)
        return {"features": features, "projected": self.head(features)}


def contrastive_loss(projected: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of finding the partner of each of 2n images by cosine similarity (NT-Xent).

    Args:
        projected: The projections of all images, in which image i and image n + i are a pair.
    """
    unit = F.normalize(projected, dim=1)
    similarities = unit @ unit.T / TEMPERATURE
    # An image must not be found as its own partner.
    similarities = similarities.masked_fill(torch.eye(len(unit), dtype=torch.bool, device=unit.device), -torch.inf)
    return F.cross_entropy(similarities, torch.arange(len(unit), device=unit.device).roll(len(unit) // 2))


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift, rotate and shear each image slightly, and add noise."""
    maps = torch.eye(2, 3) + JITTER * torch.randn(len(images), 2, 3, generator=generator)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return F.grid_sample(images, grid, align_corners=False) + noise


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Load 1,797 images of 8 x 8 pixels in a fixed random order, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # grey levels 0..16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(digits.target)[order]


def build(devices: list[str]) -> ls.DataParallel:
    """Create the encoder and replicate it on devices."""
    torch.manual_seed(0)
    return ls.DataParallel(Encoder(), devices, num_shards=NUM_SHARDS)


def train(encoder: ls.DataParallel, images: torch.Tensor, epochs: int) -> list[float]:
    """Train the encoder, and return the mean loss of each epoch."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        total = torch.zeros(())
        batches = torch.randperm(len(images), generator=generator).split(BATCH_SIZE)
        for batch in batches:
            # Augmented before the batch is split, so that the random numbers do not depend on the devices.
            pairs = torch.cat([augment(images[batch], generator) for _ in range(2)])
            optimizer.zero_grad()
            loss = contrastive_loss(encoder(pairs)["projected"])  # over all pairs of the whole batch
            loss.backward()  # on all devices
            optimizer.step()
            total += loss.detach().cpu()
        losses.append(float(total) / len(batches))
    return losses


@torch.no_grad()
def pair_accuracy(encoder: nn.Module, images: torch.Tensor) -> float:
    """Return how often an augmented image is more similar to its partner than to any other image."""
    generator = torch.Generator().manual_seed(1)
    one, other = (F.normalize(encoder(augment(images, generator))["projected"].cpu(), dim=1) for _ in range(2))
    return float(((one @ other.T).argmax(dim=1) == torch.arange(len(images))).float().mean())


@torch.no_grad()
def neighbor_accuracy(encoder: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return how often the most similar training image shows the same digit as a test image."""
    unit = F.normalize(encoder(images)["features"].cpu(), dim=1)
    nearest = (unit[:NUM_TEST] @ unit[NUM_TEST:].T).argmax(dim=1)
    return float((labels[NUM_TEST:][nearest] == labels[:NUM_TEST]).float().mean())


def gradient(encoder: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss, flattened over all parameters."""
    encoder.zero_grad()
    contrastive_loss(encoder(images)["projected"]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()])


def largest_error(images: torch.Tensor) -> float:
    """Return the largest relative error, in float64, of the gradients of several splits of the batch."""
    # In float64, the rounding errors of a correct gradient are far below any real difference.
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
    """Train the encoder, and print how well it matches images before and after."""
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
    before = pair_accuracy(encoder, images[:NUM_TEST]), neighbor_accuracy(encoder, images, labels)
    losses = train(encoder, images[NUM_TEST:], options.epochs)
    after = pair_accuracy(encoder, images[:NUM_TEST]), neighbor_accuracy(encoder, images, labels)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"finds its partner among {NUM_TEST} new images: {before[0]:.1%} -> {after[0]:.1%}")
    print(f"nearest training image shows the same digit: {before[1]:.1%} -> {after[1]:.1%}")
    print(f"weights {ls.digest(encoder)}")


if __name__ == "__main__":
    main()
