"""Train a classifier of handwritten digits on every core; the weights are bitwise equal on any number of cores.

    python examples/digits.py                 on every core (or every GPU)
    python examples/digits.py --devices 1     on one device: the same digest
    python examples/digits.py --compare       on all, on one and on three devices, and compare the digests
    python examples/digits.py --seeds 5       with five seeds, and print their mean accuracy
    python examples/digits.py --resume        write snapshots, and continue from the newest one

They are equal on one machine with one build of torch. The digits are the 1,797 images of 8 x 8 pixels that
come with scikit-learn (Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", 1998, UCI Machine
Learning Repository); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import TensorDataset

import lockstep as ls

# The recipe. These numbers, the seed and the data determine the weights; the devices do not. The numbers were tuned
# on the validation images and never on the test images, which are used for the final evaluation only.
NUM_TEST = 360  # images; a fifth of all, the same ones for every seed
NUM_VALIDATION = 180  # images, split off from the rest; 1,257 remain for training
BATCH_SIZE = 128  # images per update
NUM_SHARDS = 8  # per batch, so that up to 8 devices have work; batch norm normalizes over 16 images
EPOCHS = 40  # about ten seconds on two cores
LR = 0.05  # at the start; a cosine schedule reduces it to 0 at the end
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
DROPOUT = 0.3  # the fraction of the features that are dropped in training
JITTER = 0.1  # the largest deviation of an image's affine map from the identity; 1 is half an image
COLUMNS = ["epoch", "main/loss", "val/main/loss", "val/main/accuracy", "elapsed_time"]


def load_images() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Load the training, validation and test images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # grey levels 0..16
    rest, test = split(TensorDataset(images, torch.tensor(digits.target)), NUM_TEST)
    train, validation = split(rest, NUM_VALIDATION)
    return train, validation, test


def split(dataset: TensorDataset, num_held_out: int) -> tuple[TensorDataset, TensorDataset]:
    """Split a dataset, stratified by digit and independently of the seed."""
    images, labels = dataset.tensors
    kept, held_out = train_test_split(range(len(labels)), test_size=num_held_out, stratify=labels, random_state=0)
    return TensorDataset(images[kept], labels[kept]), TensorDataset(images[held_out], labels[held_out])


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    """Create a convolution of 3 x 3 pixels with batch norm and ReLU."""
    # Batch norm subtracts the mean, so that a bias would have no effect.
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def build_model() -> nn.Module:
    """Create a small convolutional network: 8 x 8, 4 x 4, 2 x 2 pixels, ten classes."""
    return nn.Sequential(
        conv_block(1, 32),
        conv_block(32, 64),
        nn.MaxPool2d(2),
        conv_block(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(DROPOUT),
        nn.Linear(64 * 2 * 2, 10),
    )


def jittered_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Shift, rotate, scale and shear each image slightly, and compute the cross entropy.

    The random numbers come from the shard's random stream, as those of dropout do, and do not depend on the device.
    """
    identity = torch.eye(2, 3, device=images.device)
    maps = identity + JITTER * (2 * torch.rand(len(images), 2, 3, device=images.device) - 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.cross_entropy(model(F.grid_sample(images, grid, align_corners=False)), labels)


def evaluator(dataset: TensorDataset) -> ls.extensions.Evaluator:
    """Create an evaluator of the loss and the accuracy on images without augmentation."""
    return ls.extensions.Evaluator(
        ls.BatchIterator(dataset, BATCH_SIZE, repeat=False),
        metrics={"accuracy": ls.metrics.Accuracy()},
        loss_fn=ls.supervised(F.cross_entropy),
    )


def train(
    devices: str, *, seed: int, epochs: int, precision: str, out: Path, table: bool = False, resume: bool = False
) -> tuple[float, str]:
    """Train once, and return the accuracy on the test images and the digest of the weights."""
    train_set, validation_set, test_set = load_images()

    torch.manual_seed(seed)  # for the initial weights; all later random numbers come from lockstep's streams
    model = build_model()
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer.add_hook(ls.optim.hooks.WeightDecay(WEIGHT_DECAY))
    num_updates = -(-epochs * len(train_set) // BATCH_SIZE)  # rounded up
    updater = ls.ParallelUpdater(
        ls.BatchIterator(train_set, BATCH_SIZE, shuffle=True, seed=seed),
        optimizer,
        model,
        devices=parse_devices(devices),
        num_shards=NUM_SHARDS,
        loss_fn=jittered_loss,
        seed=seed,
        precision=precision,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates),
    )
    trainer = ls.Trainer(updater, until=(epochs, "epoch"), out=out)
    trainer.extend(evaluator(validation_set), name="val")
    trainer.extend(ls.extensions.LogReport())
    curves = ["main/loss", "val/main/loss", "val/main/accuracy"]
    trainer.extend(ls.extensions.PlotReport(curves, title=f"Handwritten digits, seed {seed}"))
    trainer.extend(ls.extensions.ProgressBar())
    if table:
        trainer.extend(ls.extensions.PrintReport(COLUMNS))
    if resume:
        trainer.extend(ls.extensions.Snapshot(best="val/main/accuracy"), trigger=(1, "epoch"))
    trainer.run(resume="auto" if resume else None)

    accuracy = float(evaluator(test_set).evaluate(model)["accuracy"])
    digest = ls.digest(model)
    placement = f"{len(updater.devices)} x {updater.devices[0].type}"
    print(f"seed {seed}: test accuracy {accuracy:.2%}, {trainer.elapsed_time:.1f} s on {placement}")
    print(f"weights {digest}")
    return accuracy, digest


def parse_devices(text: str) -> str | int | list[str]:
    """Parse "auto", a number of devices of the type that "auto" selects, or names separated by commas."""
    if text.isdecimal():
        return int(text)
    return text if text == "auto" else text.split(",")


def several_devices(count: int) -> str:
    """Return the names of accelerators, which can hold several replicas each, or of CPU devices if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ",".join(["cpu"] * count)
    return ",".join(f"{accelerator.type}:{index % torch.accelerator.device_count()}" for index in range(count))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="auto", help='"auto", a number, or names such as cpu,cpu,cpu')
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--compare", action="store_true", help="train on one and three devices too, and compare")
    several.add_argument("--resume", action="store_true", help="write snapshots and continue from the newest one")
    several.add_argument("--seeds", type=int, default=1, help="the number of seeds to train with, from --seed on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for log and curve")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train according to the command line."""
    options = parse_options(arguments)
    run = partial(train, epochs=options.epochs, precision=options.precision)
    if options.compare:
        digests = {
            run(devices, seed=options.seed, out=options.out / f"on-{devices}")[1]
            for devices in dict.fromkeys([options.devices, several_devices(1), several_devices(3)])
        }
        if len(digests) > 1:
            sys.exit("The digests differ.")
        print("The digests are equal: the same weights, bit for bit.")
    elif options.seeds > 1:
        seeds = range(options.seed, options.seed + options.seeds)
        accuracies = [run(options.devices, seed=seed, out=options.out / f"seed-{seed}")[0] for seed in seeds]
        print(f"mean test accuracy of {len(seeds)} seeds: {sum(accuracies) / len(seeds):.2%}")
    else:
        run(options.devices, seed=options.seed, out=options.out, table=True, resume=options.resume)
        print(f"log and curve: {options.out / 'log.jsonl'}, {options.out / 'curve.png'}")
        print("On one device the digest is the same: add --devices 1, or --compare to see both.")


if __name__ == "__main__":
    # On GPUs, some convolution algorithms of cuDNN give other bits in every run.
    torch.backends.cudnn.deterministic = True
    main()
