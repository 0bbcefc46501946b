"""Ranks whose optimizers hold the parameters in other orders, as those of a set are, are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

X, Y = torch.arange(32.0).view(8, 4).cos(), torch.arange(8) % 3


def of_other_order(communicator: ls.Communicator) -> str:
    """Return the error of ranks whose optimizers hold the parameters in other orders, as those of a set do."""
    model = nn.Linear(4, 3)
    parameters = list(model.parameters())[:: -1 if communicator.rank else 1]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    made = ls.ParallelUpdater(
        [(X, Y)],
        optimizer,
        model,
        loss_fn=ls.supervised(functional.cross_entropy),
        devices=1,
        num_shards=2,
        communicator=communicator,
    )
    with finalized(made) as updater, pytest.raises(ls.DisagreementError) as caught:
        updater.update()
    return str(caught.value)


def test_optimizers_of_other_orders_are_refused() -> None:
    assert all("`optimizer.order_of_parameters`" in error for error in run_on_ranks(of_other_order, 2))
