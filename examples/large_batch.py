"""Train with batches 16 times as large, with and without the recipe that compensates for it.

    python examples/large_batch.py [--seeds 8] [--plot large-batch.png]

A small network is trained on handwritten digits for 90 epochs: with batches of 32, and with batches of 512 and
more and more of the recipe of Goyal et al. (2017, arXiv:1706.02677): the learning rate multiplied by 16, a warmup
over 5 epochs, and momentum correction. Prints the accuracy on samples held out.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, hooks, large_batch_schedule

EPOCHS = 90
MILESTONES = (30, 60, 80)  # in epochs; the learning rate is divided by 10 at each
SMALL, LARGE = 32, 512  # samples per batch
BASE_LR = 0.04  # tuned for SMALL
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
NUM_TRAIN = 1536  # of 1797 samples; 3 batches of LARGE


@dataclass(frozen=True)
class Recipe:
    """The settings of one training run."""

    name: str
    batch_size: int
    scaled: bool  # whether the learning rate is scaled with the batch size
    warmup: int  # in epochs
    corrected: bool  # whether a change of the learning rate applies to the momentum at once

    def optimizer(self, model: nn.Module) -> HookedOptimizer:
        """Create the optimizer."""
        rule = CorrectedMomentumSGD if self.corrected else MomentumSGD
        optimizer = rule(model.parameters(), lr=BASE_LR, momentum=MOMENTUM)
        optimizer.add_hook(hooks.WeightDecay(WEIGHT_DECAY))
        return optimizer


RECIPES = [
    Recipe("batch 32", SMALL, scaled=True, warmup=0, corrected=True),
    Recipe("batch 512, rate of 32", LARGE, scaled=False, warmup=0, corrected=True),
    Recipe("batch 512, scaled", LARGE, scaled=True, warmup=0, corrected=True),
    Recipe("batch 512, scaled, warm-up, momentum uncorrected", LARGE, scaled=True, warmup=5, corrected=False),
    Recipe("batch 512, scaled, warm-up", LARGE, scaled=True, warmup=5, corrected=True),
]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images, as 64 numbers in 0..1 each, and their labels, in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def network() -> nn.Module:
    """Create a network whose initial weights are three times as large as torch's default.

    Large initial weights make the first updates unstable at a high learning rate, which is what a warmup is for.
    """
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)]
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.weight *= 3
    return nn.Sequential(*layers)


def train(recipe: Recipe, seed: int, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Train once, and return the accuracy on the held-out samples after each epoch, in percent."""
    torch.manual_seed(seed)
    model = network()
    optimizer = recipe.optimizer(model)
    updates_per_epoch = NUM_TRAIN // recipe.batch_size
    schedule = large_batch_schedule(
        optimizer,
        base_lr=BASE_LR,
        batch_size=recipe.batch_size if recipe.scaled else SMALL,
        base_batch_size=SMALL,
        warmup=(recipe.warmup, "epoch"),
        milestones=MILESTONES,
        updates_per_epoch=updates_per_epoch,
    )
    accuracies = []
    for _ in range(EPOCHS):
        # Both batch sizes divide NUM_TRAIN, so that no batch is smaller than the schedule assumes.
        for batch in torch.split(torch.randperm(NUM_TRAIN), recipe.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()  # after every update, not every epoch
        with torch.no_grad():
            correct = model(images[NUM_TRAIN:]).argmax(dim=1) == labels[NUM_TRAIN:]
        accuracies.append(100 * correct.float().mean().item())
    return accuracies


def plot(runs: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the error of each recipe over the epochs: the median over the seeds, and the range."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - needed for plots only

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, accuracies in runs.items():
        errors = [sorted(100 - run[epoch] for run in accuracies) for epoch in range(EPOCHS)]
        epochs = range(1, EPOCHS + 1)
        (line,) = axes.plot(epochs, [statistics.median(each) for each in errors], label=name)
        axes.fill_between(
            epochs,
            [each[0] for each in errors],
            [each[-1] for each in errors],
            color=line.get_color(),
            alpha=0.15,
        )
    axes.set(yscale="log", xlabel="epoch", ylabel="error on samples held out (%)", xlim=(1, EPOCHS))
    axes.set_yticks([2, 5, 10, 20, 50, 90], ["2", "5", "10", "20", "50", "90"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train with every recipe and every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="the number of seeds")
    parser.add_argument("--plot", type=Path, help="the file to plot the error over the epochs to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    images, labels = digits()
    runs: dict[str, list[list[float]]] = {}
    print(f"| {'recipe':50} | updates | accuracy: mean | least | most |")
    print(f"|{'-' * 52}|--------:|---------------:|------:|-----:|")
    for recipe in RECIPES:
        runs[recipe.name] = [train(recipe, seed, images, labels) for seed in range(arguments.seeds)]
        final = [accuracies[-1] for accuracies in runs[recipe.name]]
        updates = EPOCHS * NUM_TRAIN // recipe.batch_size
        numbers = f"{statistics.mean(final):14.1f} | {min(final):5.1f} | {max(final):4.1f}"
        print(f"| {recipe.name:50} | {updates:7} | {numbers} |", flush=True)
    if arguments.plot is not None:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
