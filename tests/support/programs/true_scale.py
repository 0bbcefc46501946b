"""Record what hooks on activations see in an update, sample by sample, alone or on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import lockstep as ls
from tests.support.runs import finalized

SEEN: dict[int, torch.Tensor] = {}
"""The gradient of each sample's activations by the number of the sample, which is its first feature."""


class Clamped(torch.autograd.Function):
    """The identity, with a gradient that is reversed and cut off at a fixed threshold."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradient.clamp(-0.01, 0.01)


class Net(nn.Module):
    """Two layers with a threshold between them."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner, self.outer = nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Clamped.apply(self.inner(x).tanh())
        hidden.register_hook(lambda gradient: SEEN.update(zip(x[:, 0].tolist(), gradient.clone(), strict=True)))
        output: torch.Tensor = self.outer(hidden)
        return output


def data(size: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.arange(size)
    return x.to(dtype), torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype)


def mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def plain(
    size: int, dtype: torch.dtype = torch.float64, *, loss_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients that a plain loop shows to the hook, and those of the parameters."""
    SEEN.clear()
    model = Net(dtype)
    (mean(model, *data(size, dtype)) * loss_scale).backward()
    seen, gradients = _found(model, range(size))
    return seen, gradients / loss_scale


def updated(
    communicator: ls.Communicator | None,
    sizes: Sequence[int],
    num_shards: int | None,
    *,
    num_devices: int = 1,
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `plain` returns for an update of batches of these sizes, with the samples of this rank only."""
    SEEN.clear()
    model = Net(dtype)
    parts = zip(*(each.split(list(sizes)) for each in data(sum(sizes), dtype)), strict=True)
    updater = ls.ParallelUpdater(
        list(parts),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=mean,
        accumulate=len(sizes),
        communicator=communicator,
        audit_every=0,
        **(options or {}),
    )
    with finalized(updater):
        assert updater.update().applied
    return _found(model, sorted(int(each) for each in SEEN))


def _found(model: nn.Module, samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.stack([SEEN[float(each)] for each in samples])
    return seen, torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
