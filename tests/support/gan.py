"""A GAN: two networks, two optimizers, three iterators, and an update of three computations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.runs import ONE, Placement

Networks = dict[str, nn.Module]
PHASES = ["begin", "judged", "judge moved", "generated", "end"]
"""The places between the parts of an update."""


def networks() -> Networks:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return {
            "gen": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
            "dis": nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)),
        }


def data(num_samples: int = 23, seed: int = 5) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 2, generator=torch.Generator().manual_seed(seed)))


def made(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    return nets["gen"](torch.randn(len(real), 4))


def judge_loss(nets: Networks, real: torch.Tensor) -> ls.Loss:
    right = softplus(-nets["dis"](real)).mean()
    return ls.Loss(right + softplus(nets["dis"](made(nets, real))).mean(), metrics={"right": (right.detach(), 1)})


def generator_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    return softplus(-nets["dis"](made(nets, real))).mean()


class GanStep:
    """Two steps of the judge, each on a batch of its own, and one of the generator.

    Args:
        visit: Called with the name of each phase as it comes.
    """

    def __init__(self, visit: Callable[[str], None] = lambda _: None) -> None:
        self.visit = visit
        self.judge_loss: Any = judge_loss
        self.generator_loss: Any = generator_loss

    def __call__(self, updater: ls.ParallelUpdater, batch: Any) -> None:
        self.visit("begin")
        with torch.no_grad():  # a draw of the step function's own, and a write past any optimizer
            updater.get_all_models()["dis"][0].bias.add_(0.01 * torch.randn(8))
        for real in (batch, updater.next_batch("further")):
            updater.compute_gradients(real, loss_fn=self.judge_loss, optimizer="dis")
            self.visit("judged")
            updater.apply_gradients("dis")
            self.visit("judge moved")
        updater.compute_gradients(batch, loss_fn=self.generator_loss, optimizer="gen")
        self.visit("generated")
        updater.apply_gradients("gen")
        self.visit("end")


def gan(step: Any = None, placement: Placement = ONE, **options: Any) -> ls.ParallelUpdater:
    """Build a run that has not begun."""
    nets = networks()
    optimizers = {
        "gen": torch.optim.Adam(nets["gen"].parameters(), lr=0.01),
        "dis": ls.CorrectedMomentumSGD(nets["dis"].parameters(), lr=0.05, momentum=0.9),
    }
    schedulers = {
        name: torch.optim.lr_scheduler.LambdaLR(each, lambda count: 1 / (1 + 0.1 * count))
        for name, each in optimizers.items()
    }
    iterators = {
        "main": ls.BatchIterator(data(), 12, shuffle=True, seed=3, last_batch="wrap"),
        "further": ls.BatchIterator(data(14, seed=6), 13, shuffle=True, seed=4, last_batch="wrap"),
    }
    recipe: dict[str, Any] = {"num_shards": 5, "scheduler": schedulers, **options}
    return ls.ParallelUpdater(
        iterators,
        optimizers,
        nets,
        devices=["cpu"] * placement.num_devices,
        workloads=placement.workloads,
        step_fn=step or GanStep(),
        **recipe,
    )


def snapshot(updater: ls.ParallelUpdater) -> str:
    """Name everything the next update depends on."""
    return ls.digest(updater.state_dict())


def run(updater: ls.ParallelUpdater, updates: int) -> str:
    """Go on until so many updates are done, end the threads, and name the state."""
    try:
        while updater.iteration < updates:
            updater.update()
        return snapshot(updater)
    finally:
        updater.finalize()
