"""Recipes with several computations and several networks per update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from equal.digest_log import DigestLog
from equal.models import build_seeded
from equal.runs import Placement, Run, run_updates

Networks = Any
"""The networks by name."""


def _painter() -> nn.Module:
    """Create the generator."""
    return nn.Sequential(nn.Linear(3, 10), nn.BatchNorm1d(10), nn.SiLU(), nn.Linear(10, 4))


def _critic() -> nn.Module:
    """Create the discriminator."""
    return nn.Sequential(nn.Linear(4, 11), nn.Dropout(0.25), nn.LeakyReLU(0.1), nn.Linear(11, 1))


def _samples(count: int, seed: int) -> TensorDataset:
    """Draw real samples."""
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)))


def _painted(nets: Networks, like: torch.Tensor) -> torch.Tensor:
    """Generate as many samples as there are real ones."""
    painted: torch.Tensor = nets["painter"](torch.rand(len(like), 3) - 0.5)
    return painted


def critic_loss(nets: Networks, real: torch.Tensor) -> ls.Loss:
    """Return the least-squares loss of the critic on real and painted samples."""
    scores = nets["critic"](real)
    value = (scores - 1).square().mean() + nets["critic"](_painted(nets, real)).square().mean()
    return ls.Loss(value, metrics={"scores": (scores.detach().sum(), len(real))})


def painter_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Return the least-squares loss of painted samples that the critic takes for real."""
    loss: torch.Tensor = (nets["critic"](_painted(nets, real)) - 1).square().mean()
    return loss


def joint_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Return a loss that trains both networks at once."""
    return painter_loss(nets, real) + nets["critic"](real).abs().mean()


def step(updater: ls.ParallelUpdater, batch: Any) -> None:
    """Step the critic on two batches, the second from another iterator, and the painter on the first."""
    # A step function may change weights, and draw random numbers, before and between its computations.
    with torch.no_grad():
        for parameter in updater.get_all_models()["critic"].parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape)).clamp_(-0.6, 0.6)
    for real in (batch, updater.next_batch("more")):
        updater.compute_gradients(real, loss_fn=critic_loss, optimizer="critic")
        updater.apply_gradients("critic")
    updater.compute_gradients(batch, loss_fn=painter_loss, optimizer="painter")
    updater.apply_gradients("painter")


class Painting(ls.ParallelUpdater):
    """An updater whose update is defined by a method: both gradients first, then both steps."""

    def update_core(self, batch: Any) -> None:
        """Compute both gradients with the same weights."""
        self.compute_gradients(batch, loss_fn=critic_loss, optimizer="critic")
        self.compute_gradients(batch, loss_fn=painter_loss, optimizer="painter")
        self.apply_gradients("painter")
        self.apply_gradients("critic")


def painted(
    kind: type[ls.ParallelUpdater] = ls.ParallelUpdater,
    *,
    updates: int = 6,
    fused: bool = False,
    **options: Any,
) -> Run:
    """Return a run of two networks, each with its own optimizer and scheduler."""

    def run(placement: Placement) -> list[str]:
        log = DigestLog()
        nets = {"painter": build_seeded(_painter), "critic": build_seeded(_critic)}
        optimizers: dict[str, torch.optim.Optimizer] = {
            "painter": torch.optim.AdamW(nets["painter"].parameters(), lr=0.01, fused=fused),
            "critic": torch.optim.SGD(nets["critic"].parameters(), lr=0.05, fused=True)
            if fused
            else ls.MomentumSGD(nets["critic"].parameters(), lr=0.05, momentum=0.8),
        }
        placed: dict[str, Any] = dict(options)
        if not fused:
            placed["scheduler"] = {
                name: torch.optim.lr_scheduler.LinearLR(each, total_iters=9) for name, each in optimizers.items()
            }
        updater = kind(
            {
                "main": ls.BatchIterator(_samples(31, 32), 13, shuffle=True, last_batch="wrap", seed=1),
                "more": ls.BatchIterator(_samples(17, 33), 10, shuffle=True, last_batch="wrap", seed=2),
            },
            optimizers,
            nets,
            devices=["cpu"] * placement.devices,
            **{"num_shards": 4, **placed},
        )
        try:
            run_updates(updater, log, updates)
        finally:
            updater.finalize()
        return log.digests

    return run
