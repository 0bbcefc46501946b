"""Train a GAN on any number of devices, to generate points on a circle.

An update consists of two computations and two steps, which a `step_fn` defines. The noise is drawn inside the
loss functions, from the random stream of the shard, and therefore does not depend on the number of devices.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import lockstep as ls

LATENT = 4  # the number of noise values per point
BATCH_SIZE = 64
Networks = dict[str, nn.Module]


def circle(num_points: int) -> TensorDataset:
    """Sample points on a circle of radius 1."""
    angles = 2 * math.pi * torch.rand(num_points, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))


def networks() -> Networks:
    """Create the generator and the discriminator."""
    torch.manual_seed(0)
    return {
        "gen": nn.Sequential(
            nn.Linear(LATENT, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        ),
        "dis": nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        ),
    }


def discriminator_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Compute the loss of classifying real and generated points."""
    fake = nets["gen"](torch.randn(len(real), LATENT, device=real.device))
    return softplus(-nets["dis"](real)).mean() + softplus(nets["dis"](fake)).mean()


def generator_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Compute the loss of generated points that are not classified as real."""
    fake = nets["gen"](torch.randn(len(real), LATENT, device=real.device))
    return softplus(-nets["dis"](fake)).mean()


def step(updater: ls.ParallelUpdater, batch: Any) -> None:
    """Run one update: a step of the discriminator, then one of the generator with the new discriminator."""
    # The discriminator's loss also runs the generator, whose gradients and running statistics this call leaves alone.
    updater.compute_gradients(batch, loss_fn=discriminator_loss, optimizer="dis", buffers_of=["dis"])
    updater.apply_gradients("dis")
    updater.compute_gradients(batch, loss_fn=generator_loss, optimizer="gen")
    updater.apply_gradients("gen")


def build(devices: list[str], *, num_shards: int = 4) -> ls.ParallelUpdater:
    """Create the updater."""
    nets = networks()
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for name, net in nets.items()}
    batches = ls.BatchIterator(circle(1024), BATCH_SIZE, shuffle=True, seed=0)
    return ls.ParallelUpdater(batches, optimizers, nets, devices=devices, num_shards=num_shards, step_fn=step, seed=0)


def main() -> None:
    """Train, and print the mean radius of generated points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--updates", type=int, default=1200)
    options = parser.parse_args()
    updater = build(options.devices)
    for number in range(options.updates):
        result = updater.update()
        if number % 200 == 199:
            losses = {name: round(float(part.loss), 3) for name, part in result.parts.items()}
            print(f"update {number + 1}: {losses}")
    updater.finalize()
    models = updater.get_all_models()
    generator = models["gen"].eval()
    with torch.no_grad():
        radii = generator(torch.randn(1000, LATENT)).norm(dim=1)
    print(f"radius {radii.mean():.2f} ± {radii.std():.2f}, digest {ls.digest(models['gen'])[:16]}")


if __name__ == "__main__":
    main()
