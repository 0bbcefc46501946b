"""Hooks of optimizers find the buffers that the forward has left, and an error in one restores those of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep as ls
from tests.support.runs import finalized

UPDATES = 4


class Reading(torch.optim.SGD):
    """Steps by a rate that follows a buffer of the model."""

    model: nn.Module

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1 / float(self.model[1].num_batches_tracked)  # type: ignore[index]
        return super().step(closure)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.arange(8) % 2) for _ in range(UPDATES)]


def model_with_statistics() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def averaged_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> AveragedModel:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    return average


def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x.double()), y)


def plain(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, AveragedModel]:
    model = model_with_statistics()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.model = model  # type: ignore[attr-defined]
    average = averaged_by(optimizer, model)
    for x, y in batches():
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        optimizer.step()
    return model, average


@pytest.mark.parametrize("kind", [torch.optim.SGD, Reading])
def test_hooks_and_optimizers_of_your_own_read_the_buffers_of_this_update(kind: type[torch.optim.Optimizer]) -> None:
    model = model_with_statistics()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.model = model  # type: ignore[attr-defined]
    average = averaged_by(optimizer, model)
    updater = ls.ParallelUpdater(batches(), optimizer, model, devices=["cpu"], num_shards=1, loss_fn=loss_fn)
    with finalized(updater):
        for _ in range(UPDATES):
            updater.update()
    for ours, expected in zip((model, average), plain(kind), strict=True):
        torch.testing.assert_close(ours.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_error_of_a_hook_before_the_step_restores_the_buffers(num_devices: int) -> None:
    model = model_with_statistics()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ls.ParallelUpdater(
        batches(), optimizer, model, devices=["cpu"] * num_devices, num_shards=2, loss_fn=loss_fn
    )

    def refuse(*_: object) -> None:
        assert int(model[1].num_batches_tracked) == 2
        raise ValueError("refused")

    with finalized(updater):
        updater.update()
        before = ls.digest(model.state_dict())
        handle = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ValueError, match="refused"):
            updater.update()
        assert ls.digest(model.state_dict()) == before
        handle.remove()
        updater.update()
    assert int(model[1].num_batches_tracked) == 2
