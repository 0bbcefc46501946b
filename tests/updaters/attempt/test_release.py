"""An update leaves nothing in memory that only the garbage collector would free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


CASES: dict[str, dict[str, Any]] = {
    "no audit": {"audit_every": 0},
    "audits": {"audit_every": 1},
    "audits of one shard": {"audit_every": 1, "num_shards": 1},
    "skipped updates": {"audit_every": 1, "loss_scale": 1e38, "on_overflow": "skip"},
}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = net(x).square().mean()
    return loss


def num_left(**options: Any) -> int:
    """Return the number of gradients of three updates that are still there when the model has others or none."""
    model, left = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with finalized(ls.ParallelUpdater([X], optimizer, model, loss_fn=loss_fn, **options)) as updater:
        for _ in range(3):
            updater.update()
            left += [weakref.ref(each.grad) for each in model.parameters() if each.grad is not None]
            model.zero_grad()
    assert left
    return sum(each() is not None for each in left)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradients_end_with_their_update(case: str, devices: int) -> None:
    assert num_left(devices=devices, **{"num_shards": 3, **CASES[case]}) == 0


def on_rank(communicator: ls.Communicator) -> dict[str, int]:
    gc.collect()
    gc.disable()
    try:
        given = {"devices": 1, "communicator": communicator, "num_shards": 4}
        return {case: num_left(**{**given, **options}) for case, options in CASES.items()}
    finally:
        gc.enable()


def test_gradients_of_ranks_end_with_their_update() -> None:
    assert run_on_ranks(on_rank, 2) == [dict.fromkeys(CASES, 0)] * 2
