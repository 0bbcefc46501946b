"""Train the models of the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from models import Task, loss_fn

import lockstep as ls

DTYPES = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}


@contextmanager
def updater_of(
    task: Task,
    devices: Sequence[str],
    *,
    num_shards: int,
    batch_size: int = 16,
    precision: str = "fp32",
    fused: bool | None = None,
    lr: float = 0.01,
    batch: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> Iterator[ls.ParallelUpdater]:
    """Create an updater over one batch, and end its threads afterwards."""
    model = task.model().to(DTYPES.get(precision, torch.float32)).to(devices[0])
    chosen = {} if fused is None else {"fused": fused}
    updater = ls.ParallelUpdater(
        [task.batch(batch_size) if batch is None else batch],
        task.optimizer(model.parameters(), lr=lr, **chosen),
        model,
        devices=list(devices),
        num_shards=num_shards,
        loss_fn=options.pop("loss_fn", loss_fn),
        precision=precision,
        **options,
    )
    try:
        yield updater
    finally:
        updater.finalize()


def digest_of(updater: ls.ParallelUpdater) -> str:
    """Return the digest of weights, buffers and optimizer state."""
    return ls.digest(updater.get_all_models()["main"], updater.get_optimizer("main"))


def trained(task: Task, devices: Sequence[str], *, updates: int = 3, **options: Any) -> str:
    """Train, and return the digest."""
    with updater_of(task, devices, **options) as updater:
        for _ in range(updates):
            updater.update()
        return digest_of(updater)


def counted(digests: Sequence[str]) -> str:
    """Return how many different digests there are."""
    different = len(set(digests))
    return f"{different} digest" + ("s" if different > 1 else "")
