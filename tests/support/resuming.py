"""Runs that are stopped and resumed: five recipes with trainers, on any placement, and what they leave on the disk."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.snapshots import Record, read_digest_log
from lockstep.triggers import MinValue
from tests.support.gan import GanStep, data as gan_data, networks as gan_networks
from tests.support.ranks import run_on_ranks

UPDATES = 24
NUM_SAMPLES = 50


@dataclass(frozen=True)
class Place:
    """Where a run is computed."""

    devices: int
    processes: int
    workers: int

    def __repr__(self) -> str:
        return f"{self.processes}x{self.devices}w{self.workers}"


PLACES = [
    Place(devices, processes, workers) for devices, processes in ((1, 1), (2, 1), (1, 2), (1, 3)) for workers in (0, 2)
]
"""{1, 2 devices, 2, 3 processes} x loader workers {0, 2}."""


class Noted(ls.Extension):
    """Counts its calls and remembers at which updates they were."""

    _saved = ("calls",)

    def __init__(self, name: str) -> None:
        self._name, self._calls = name, list[int]()

    @property
    def name(self) -> str:
        return self._name

    @property
    def calls(self) -> list[int]:
        return self._calls

    def __call__(self, trainer: ls.Trainer) -> None:
        self._calls = [*self._calls, trainer.updater.iteration]


class PatientSnapshot(ls.extensions.Snapshot):
    """Waits for each snapshot, so that none is replaced by a newer one while a slow disk writes."""

    @property
    def name(self) -> str:
        return "Snapshot"

    def __call__(self, trainer: ls.Trainer) -> None:
        super().__call__(trainer)
        self.wait()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build()


def vectors(num_samples: int = NUM_SAMPLES) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))


def images() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(3, (NUM_SAMPLES,), generator=generator))


class Slow(torch.utils.data.Dataset[Any]):
    """Samples that draw random numbers while they are loaded, as augmentation does."""

    def __init__(self, samples: torch.utils.data.TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.samples[index]
        return inputs + 0.1 * torch.randn(inputs.shape), label


cross_entropy = ls.supervised(functional.cross_entropy)


def mlp(place: Place, communicator: ls.Communicator) -> ls.ParallelUpdater:
    """Dropout, accumulation, short last batches, a warm-up by updates, our optimizer with a hook."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)))
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.add_hook(ls.optim.hooks.WeightDecay(1e-3))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    recipe: dict[str, Any] = {
        "num_shards": 4,
        "loss_fn": cross_entropy,
        "accumulate": 3,
        "scheduler": schedule,
        "seed": 5,
    }
    batches = ls.BatchIterator(Slow(vectors()), 6, shuffle=True, seed=3, num_workers=place.workers)
    return updater((batches, optimizer, model), place, communicator, recipe)


def convnet(place: Place, communicator: ls.Communicator) -> ls.ParallelUpdater:
    """BatchNorm, a schedule, dropped last batches, channels last."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
        )
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    recipe: dict[str, Any] = {"num_shards": 3, "loss_fn": cross_entropy, "scheduler": schedule}
    batches = ls.BatchIterator(images(), 6, shuffle=True, seed=3, last_batch="drop", num_workers=place.workers)
    return updater((batches, optimizer, model), place, communicator, recipe)


def gan(place: Place, communicator: ls.Communicator) -> ls.ParallelUpdater:
    """Two networks, two optimizers, two iterators, two schedulers, and a step function."""
    nets = gan_networks()
    optimizers = {
        "gen": torch.optim.Adam(nets["gen"].parameters(), lr=0.01),
        "dis": ls.CorrectedMomentumSGD(nets["dis"].parameters(), lr=0.05, momentum=0.9),
    }
    schedulers = {
        "gen": torch.optim.lr_scheduler.ExponentialLR(optimizers["gen"], 0.95),
        "dis": torch.optim.lr_scheduler.CosineAnnealingLR(optimizers["dis"], T_max=40),
    }
    iterators = {
        "main": ls.BatchIterator(gan_data(), 12, shuffle=True, seed=3, last_batch="wrap", num_workers=place.workers),
        "further": ls.BatchIterator(gan_data(14, seed=6), 13, shuffle=True, seed=4, last_batch="wrap"),
    }
    recipe: dict[str, Any] = {"num_shards": 5, "scheduler": schedulers, "step_fn": GanStep()}
    return updater((iterators, optimizers, nets), place, communicator, recipe)


def fp16(place: Place, communicator: ls.Communicator) -> ls.ParallelUpdater:
    """A model in float16 with master weights, and a loss scale that overflows again and again."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = ls.DynamicLossScale(2.0**20, backoff=2.0**-4, growth=8.0, interval=3)
    recipe: dict[str, Any] = {
        "num_shards": 4,
        "loss_fn": half_loss,
        "precision": "fp16-true",
        "loss_scale": scale,
        "on_overflow": "retry",
    }
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3, num_workers=place.workers)
    return updater((batches, optimizer, model), place, communicator, recipe)


def adamw(place: Place, communicator: ls.Communicator) -> ls.ParallelUpdater:
    """AdamW over two groups with tied weights and a schedule of several parts."""
    model = seeded(Tied)
    groups = [{"params": [model.head.weight], "lr": 0.01}, {"params": [model.head.bias, model.bend.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.005, weight_decay=0.02)
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
    recipe: dict[str, Any] = {"num_shards": 4, "loss_fn": cross_entropy, "scheduler": schedule}
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3, num_workers=place.workers)
    return updater((batches, optimizer, model), place, communicator, recipe)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.head.weight
        self.again.bias = self.head.bias
        self.bend = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bend(torch.tanh(self.again(torch.tanh(self.head(x)))))
        return out


def half_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x.half()).float(), target)


def updater(
    parts: tuple[Any, Any, Any], place: Place, communicator: ls.Communicator, recipe: dict[str, Any]
) -> ls.ParallelUpdater:
    devices = ["cpu"] * place.devices
    return ls.ParallelUpdater(*parts, devices=devices, communicator=communicator, **recipe)


RECIPES: dict[str, Callable[..., ls.ParallelUpdater]] = {
    "mlp": mlp,
    "convnet": convnet,
    "gan": gan,
    "fp16": fp16,
    "adamw": adamw,
}


def trainer(
    name: str, place: Place, communicator: ls.Communicator, *, out: Path, updates: int, every: int = 1
) -> ls.Trainer:
    """Build a run with logs and triggers in progress."""
    made = ls.Trainer(RECIPES[name](place, communicator), (updates, "iteration"), out=out)
    loss = "main/loss" if name != "gan" else "main/dis/loss"
    made.extend(ls.extensions.LogReport(trigger=(5, "iteration")))
    made.extend(Noted("best"), trigger=MinValue(loss, trigger=(2, "iteration")))
    made.extend(Noted("samples"), trigger=(35, "sample"))
    made.extend(Noted("epochs"), trigger=(0.7, "epoch"))
    if name == "adamw":
        held_out = ls.BatchIterator(vectors(20), 7, repeat=False)
        metrics: dict[str, Any] = {"accuracy": ls.metrics.Accuracy()}
        made.extend(ls.extensions.Evaluator(held_out, metrics=metrics, loss_fn=cross_entropy), trigger=(3, "iteration"))
    made.extend(PatientSnapshot(keep=100, digest_every=1), trigger=(every, "iteration"))
    return made


def run(
    communicator: ls.Communicator, name: str, place: Place, out: str, until: tuple[int, str | None]
) -> dict[str, Any]:
    """Run until so many updates are done, and return what the extensions saw and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = ls.LocalCommunicator() if place.processes == 1 else communicator
        made = trainer(name, place, alone, out=Path(out), updates=until[0])
        made.run(resume=until[1])
    calls = {each: made.get_extension(each).calls for each in ("best", "samples", "epochs")}  # type: ignore[attr-defined]
    relevant = (ls.DeterminismWarning, ls.SnapshotWarning)
    told = [str(each.message) for each in caught if issubclass(each.category, relevant)]
    updater: Any = made.updater
    return {
        "calls": calls,
        "warnings": told,
        "applied": updater.applied_updates,
        "loss scale": updater.loss_scale.factor,
    }


def run_at(place: Place, name: str, out: Path, updates: int = UPDATES, resume: str | None = None) -> dict[str, Any]:
    """Run in processes that tests share, and return what rank 0 returned."""
    found: dict[str, Any] = run_on_ranks(run, place.processes, name, place, str(out), (updates, resume))[0]
    return found


def log_lines(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the log without the clock."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "elapsed_time"} for line in lines]


def tensor_files(out: Path) -> dict[str, bytes]:
    """Return the bytes of all tensor files by their paths."""
    folder = out / "snapshots"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*.safetensors"))}


def digests(out: Path) -> dict[int, Record]:
    """Return what the log of digests has by update."""
    return read_digest_log(out)
