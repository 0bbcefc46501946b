"""`torch.nn.utils.parametrize.cached` in a loss function gives equal bits, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import lockstep as ls

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Squared(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight  # backward needs the values, and frees them


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with parametrize.cached():
        return functional.cross_entropy(model(x)[:, :3], y) + model.weight.square().sum()


def updater_of(num_devices: int, num_shards: int) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Squared())
    return ls.ParallelUpdater(
        lambda: iter([(X, Y), (X.flip(0), Y.flip(0))]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=loss_fn,
    )


def trained(num_shards: int, *, whole: bool = False) -> dict[str, Any]:
    updater = updater_of(1, num_shards)
    for _ in range(3):
        if whole:
            # Weights would be kept over all shards of the update.
            with parametrize.cached():
                updater.update()
        else:
            updater.update()
    updater.finalize()
    return updater.get_all_models()["main"].state_dict()


def test_a_shard_computes_its_weights_anew() -> None:
    expected, one = trained(3), trained(1)
    assert all(torch.allclose(expected[name], one[name]) for name in one)
    kept = trained(3, whole=True)
    assert all(torch.equal(expected[name], kept[name]) for name in one)


def test_a_cache_for_all_threads_is_refused_on_several_devices_and_stays_usable() -> None:
    updater = updater_of(2, 4)
    try:
        with pytest.raises(ls.ReplicaError, match="cannot be used on several devices of one process"):
            updater.update()
    finally:
        updater.finalize()
    model = updater.get_all_models()["main"]
    with parametrize.cached():
        assert model.weight is model.weight
    assert model.weight is not model.weight
