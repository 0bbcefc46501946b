"""Updates of several computations for several networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from equal.models import made
from equal.runs import Place, Run, follow
from equal.trail import Trail

Networks = Any
"""Networks by name."""


def _painter() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 10), nn.BatchNorm1d(10), nn.SiLU(), nn.Linear(10, 4))


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 11), nn.Dropout(0.25), nn.LeakyReLU(0.1), nn.Linear(11, 1))


def _samples(count: int, seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)))


def _painted(nets: Networks, like: torch.Tensor) -> torch.Tensor:
    painted: torch.Tensor = nets["painter"](torch.rand(len(like), 3) - 0.5)
    return painted


def critic_loss(nets: Networks, real: torch.Tensor) -> ls.Loss:
    """Return what the critic makes of both kinds, by least squares."""
    told = nets["critic"](real)
    value = (told - 1).square().mean() + nets["critic"](_painted(nets, real)).square().mean()
    return ls.Loss(value, metrics={"told": (told.detach().sum(), len(real))})


def painter_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Return how far the critic is from taking what was painted for real."""
    loss: torch.Tensor = (nets["critic"](_painted(nets, real)) - 1).square().mean()
    return loss


def joint_loss(nets: Networks, real: torch.Tensor) -> torch.Tensor:
    """Return a loss by which both move at once."""
    return painter_loss(nets, real) + nets["critic"](real).abs().mean()


def step(updater: ls.ParallelUpdater, batch: Any) -> None:
    """Move the critic on two batches, the second one from another iterator, and the painter on the first."""
    with torch.no_grad():
        for parameter in updater.get_all_models()["critic"].parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape)).clamp_(-0.6, 0.6)
    for real in (batch, updater.next_batch("more")):
        updater.compute_gradients(real, loss_fn=critic_loss, optimizer="critic")
        updater.apply_gradients("critic")
    updater.compute_gradients(batch, loss_fn=painter_loss, optimizer="painter")
    updater.apply_gradients("painter")


class Painting(ls.ParallelUpdater):
    """Says in a method what an update does: both gradients first, then both steps."""

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
    """Return a run over two networks, each with an optimizer and a scheduler of its own."""

    def run(place: Place) -> list[str]:
        trail = Trail()
        nets = {"painter": made(_painter), "critic": made(_critic)}
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
                "main": ls.BatchIterator(_samples(31, 32), 13, shuffle=True, seed=1),
                "more": ls.BatchIterator(_samples(17, 33), 10, shuffle=True, seed=2),
            },
            optimizers,
            nets,
            devices=["cpu"] * place.devices,
            **{"num_shards": 4, **placed},
        )
        try:
            follow(updater, trail, updates)
        finally:
            updater.finalize()
        return trail.digests

    return run
