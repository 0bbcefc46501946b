"""Train a workload somewhere and name what came out by its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lockstep as ls
from lockstep.optim.hooks import GradientClipping
from tests.support.workloads import Workload

NUM_UPDATES = 7
"""Two epochs, each with a short last batch, and an update of the next one."""


@dataclass(frozen=True)
class Placement:
    """How many CPU devices, and their work loads."""

    num_devices: int
    workloads: tuple[float, ...] | Literal["auto"] | None = None

    def __repr__(self) -> str:
        return f"{self.num_devices} devices" + (f" {self.workloads}" if self.workloads else "")


ONE = Placement(1)
EQUAL = [ONE, Placement(2), Placement(3), Placement(4)]
CUT = Placement(3, (3, 1, 2))
"""Of six shards 3, 1 and 2: the first two devices have a subtree together, and neither alone."""
PLACEMENTS = [*EQUAL, Placement(2, (3, 1)), Placement(3, (1, 2, 5)), Placement(4, (4, 1, 1, 2)), CUT]
UNEVEN = [ONE, CUT]
"""One device, and the placement at which every mutant of the laws is caught."""
DAILY = pytest.mark.parametrize(
    "placements", [pytest.param(UNEVEN, id="uneven"), pytest.param(PLACEMENTS, id="all", marks=pytest.mark.slow)]
)
"""Compares two placements daily, and all of them in the slow tests."""

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "fused": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "corrected": lambda model: ls.CorrectedMomentumSGD(model.parameters(), lr=0.05, momentum=0.9),
}

cross_entropy = ls.supervised(nn.functional.cross_entropy)


def updater_for(
    work: Workload,
    placement: Placement = ONE,
    *,
    model: nn.Module | None = None,
    optimizer: str = "sgd",
    clip: float | None = None,
    batch_size: int = 9,
    num_samples: int = 23,
    loss_fn: Any = cross_entropy,
    **options: Any,
) -> ls.ParallelUpdater:
    """Build a run that has not begun."""
    model = work.model() if model is None else model
    made = OPTIMIZERS[optimizer](model)
    if clip is not None:
        made.register_step_pre_hook(GradientClipping(clip))
    batches = ls.BatchIterator(work.data(num_samples), batch_size, shuffle=True, last_batch="short", seed=3)
    return ls.ParallelUpdater(
        batches,
        made,
        model,
        devices=["cpu"] * placement.num_devices,
        workloads=placement.workloads,
        loss_fn=loss_fn,
        **options,
    )


def state_digest(updater: ls.ParallelUpdater) -> str:
    """Name weights, buffers and optimizer state by their bits."""
    return ls.digest(updater.get_all_models()["main"], updater.get_optimizer("main"))


@contextmanager
def finalized(updater: ls.ParallelUpdater) -> Iterator[ls.ParallelUpdater]:
    """End the threads at the end."""
    try:
        yield updater
    finally:
        updater.finalize()


def train(work: Workload, placement: Placement = ONE, *, updates: int = NUM_UPDATES, **options: Any) -> str:
    """Train, and give the digest of weights, buffers and optimizer state."""
    with finalized(updater_for(work, placement, **options)) as updater:
        for _ in range(updates):
            assert updater.update().applied
        return state_digest(updater)


@cache
def undisturbed(work: Workload, num_shards: int) -> str:
    """Train on one device, once for all tests that compare with it."""
    return train(work, num_shards=num_shards)


def digests(work: Workload, placements: Sequence[Placement], **options: Any) -> dict[Placement, str]:
    """Train at every placement."""
    return {placement: train(work, placement, **options) for placement in placements}
