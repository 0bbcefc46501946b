"""Updaters that leave out bad gradients, on the device or on the host, and all that can be seen of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

import lockstep as ls
from lockstep.precision import LossScale
from tests.support.runs import finalized

NUM_SHARDS = 3


@dataclass(frozen=True)
class OnlyAfter(LossScale):
    """A policy of a user, which cannot move its numbers to a device."""

    def after(self, *, finite: bool) -> OnlyAfter:
        return self if finite else OnlyAfter(self.factor / 2)


class Spoiling:
    """A loss that is infinite in some updates, of which each calls it once a shard."""

    def __init__(self, loss_fn: Callable[..., torch.Tensor], bad: Collection[int]) -> None:
        self._loss_fn = loss_fn
        self._bad = bad
        self._calls = itertools.count()

    def __call__(self, *args: Any) -> torch.Tensor:
        loss = self._loss_fn(*args)
        return loss * math.inf if next(self._calls) // NUM_SHARDS in self._bad else loss


def skipping(
    batches: Any,
    optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer],
    model: Any,
    *,
    reads: bool = False,
    **options: Any,
) -> ls.ParallelUpdater:
    """Make an updater that skips on the device; or, for a hook that may do anything, on the host."""
    if reads:
        for each in optimizer.values() if isinstance(optimizer, dict) else [optimizer]:
            each.register_step_post_hook(lambda *_: None)
    # Losses that count their calls must not be called once more.
    recipe = {"devices": ["cpu"], "num_shards": NUM_SHARDS, "on_overflow": "skip", "audit_every": 0, **options}
    return ls.ParallelUpdater(batches, optimizer, model, **recipe)


def told(updater: ls.ParallelUpdater, num_updates: int) -> dict[str, Any]:
    """Run, and give all that can be seen of it."""
    with finalized(updater):
        results = [updater.update() for _ in range(num_updates)]
        return {
            "results": [
                (each.applied, each.tries, each.loss_scale, each.nonfinite, repr(each.loss.item()))
                for result in results
                for each in (result, *result.parts.values())
            ],
            "applied": [result.applied for result in results],
            "counted": (updater.iteration, updater.applied_updates),
            "scale": updater.loss_scale,
            "state": ls.digest(updater.state_dict()),
        }
