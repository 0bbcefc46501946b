"""The smallest things that an updater can train, and an updater for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.runs import finalized


class Changing(nn.Module):
    """Adds the inputs it sees to a buffer and counts, starting from 10 and 5."""

    def __init__(self, how: str, *, only_positive: bool = False) -> None:
        super().__init__()
        self.how = how
        self.only_positive = only_positive
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.tensor(10.0))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.weight * x).mean()
        if self.only_positive and loss < 0:
            return loss
        if self.how == "rebound":
            self.total = self.total + x.sum()
            self.count = self.count + 1
        elif self.how == "in place":
            self.total += x.sum()
            self.count += 1
        else:
            self.total.data.add_(x.sum())
            self.count.data.add_(1)
        return loss


def mean_of_output(model: nn.Module, *batch: Any, **named: Any) -> torch.Tensor:
    """Take the mean of whatever comes out."""
    return model(*batch, **named).mean()


@contextmanager
def updater_of(
    model: nn.Module,
    *data: torch.Tensor,
    devices: int | Sequence[str] = 1,
    optimizer: torch.optim.Optimizer | None = None,
    batch_size: int = 4,
    loss_fn: Any = mean_of_output,
    **options: Any,
) -> Iterator[ls.ParallelUpdater]:
    """Make an updater in the order of the data, by default SGD of a rate of 1/8, and end its threads."""
    samples = TensorDataset(*(data or (torch.ones(4, 1),)))
    with finalized(
        ls.ParallelUpdater(
            ls.BatchIterator(samples, batch_size),
            optimizer or torch.optim.SGD(model.parameters(), lr=0.125),
            model,
            devices=["cpu"] * devices if isinstance(devices, int) else devices,
            loss_fn=loss_fn,
            **options,
        )
    ) as updater:
        yield updater
