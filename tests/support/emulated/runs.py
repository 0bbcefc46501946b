"""Train a workload on emulated devices and name what came out by its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import lockstep as ls
from tests.support.emulated import Record, observed
from tests.support.runs import OPTIMIZERS, finalized
from tests.support.workloads import Workload

ONE_CPU = ("cpu",)
PLACES = [
    ("emulated:0",),
    ("emulated:0", "emulated:1"),
    ("emulated:1", "emulated:1"),
    ("emulated:2", "cpu"),
    ("cpu", "emulated:2"),
]
"""One device, two, the same twice, and a CPU beside one, in either order."""
NUM_UPDATES = 2


def cross_entropy(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss in float32 of a model in any precision."""
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(inputs).float(), target)


def updater_on(
    work: Workload,
    devices: Sequence[str],
    *,
    optimizer: str = "adamw",
    num_shards: int = 3,
    loss_fn: Any = cross_entropy,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ls.ParallelUpdater:
    """Build a run that has not begun, with the model on the first device."""
    model = work.model().to(dtype).to(devices[0])
    made = OPTIMIZERS[optimizer](model)
    batches = ls.BatchIterator(work.data(12), 7, shuffle=True, last_batch="short", seed=3)
    return ls.ParallelUpdater(
        batches, made, model, devices=list(devices), loss_fn=loss_fn, num_shards=num_shards, **options
    )


def train_on(
    work: Workload, devices: Sequence[str], *, updates: int = NUM_UPDATES, **options: Any
) -> tuple[str, Record]:
    """Train; return the digest of weights, buffers and optimizer state, and what the devices observed.

    Raises:
        AssertionError: If two streams raced.
    """
    with finalized(updater_on(work, devices, **options)) as updater, observed() as record:
        for _ in range(updates):
            updater.update()
        model, optimizer = updater.get_all_models()["main"], updater.get_optimizer("main")
    assert not record.races, record.races
    return ls.digest(model, optimizer), record
