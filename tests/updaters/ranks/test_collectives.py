"""Collectives of torch.distributed that a user's functions call among those of lockstep are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

X, Y = torch.arange(32.0).view(8, 4).cos(), torch.arange(8) % 3


def gathered(value: torch.Tensor) -> torch.Tensor:
    """Return a value with those of all ranks, as published criteria do."""
    return torch.cat([*all_gather(value[None])]).mean(0)


def averaged(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a number over all ranks."""
    whole = value.detach().clone()
    dist.all_reduce(whole)
    return value + (whole - whole)


WAYS: dict[str, Any] = {"all_gather": gathered, "all_reduce": averaged}


class Synchronized(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + averaged(x.mean())


def error_of(communicator: ls.Communicator, where: str, way: str) -> str:
    """Return the error of the first update."""
    torch.manual_seed(0)
    model = (Synchronized if where == "model" else nn.Linear)(4, 3)
    loss_fn: Any = ls.supervised(functional.cross_entropy)
    if where == "loss function":
        loss_fn = lambda model, x, y: WAYS[way](functional.cross_entropy(model(x), y))  # noqa: E731
    elif where == "criterion":
        loss_fn = ls.BatchLoss(
            lambda model, x, y: (model(x), y), lambda outputs: WAYS[way](functional.cross_entropy(*outputs))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = ls.ParallelUpdater(
        [(X, Y)], optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_fn, communicator=communicator
    )
    before = ls.digest(model)
    with finalized(made) as updater, pytest.raises(ls.OrderError) as caught:
        updater.update()
    assert ls.digest(model) == before
    return str(caught.value)


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("where", "who"),
    [
        ("criterion", "The criterion of a BatchLoss"),
        ("loss function", "`loss_fn` and the model"),
        ("model", "`loss_fn` and the model"),
    ],
)
def test_a_collective_of_a_users_function_is_refused(where: str, who: str, way: str) -> None:
    for error in run_on_ranks(error_of, 2, where, way):
        assert error.startswith(f"{who} must call no collective of torch.distributed")


def digest_of(communicator: ls.Communicator) -> str:
    """Train without a collective of one's own; one between two updates is the user's own affair."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = ls.BatchLoss(lambda model, x, y: (model(x), y), lambda outputs: functional.cross_entropy(*outputs))
    made = ls.ParallelUpdater(
        [(X, Y)], optimizer, model, devices=["cpu"], num_shards=4, loss_fn=loss_fn, communicator=communicator
    )
    with finalized(made) as updater:
        for _ in range(10):
            updater.update()
            dist.all_reduce(torch.ones(1))
    return ls.digest(model)


def test_collectives_between_updates_are_left_alone() -> None:
    assert len(set(run_on_ranks(digest_of, 2))) == 1
