"""Each reason to read something on the host is given where it holds, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized
from tests.support.skipping import OnlyAfter, skipping, told

NUM_UPDATES = 6
BAD = 2
"""The update of whose batch the last sample is infinite."""


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(2, 1)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), x.sum(1, keepdim=True))


def weighed(model: nn.Module, x: torch.Tensor) -> ls.Loss:
    return ls.Loss(loss_of(model, x), weight=torch.tensor(float(len(x))))


def updater_of(*, model: nn.Module | None = None, scheduled: bool = False, **options: Any) -> ls.ParallelUpdater:
    model = small_model() if model is None else model
    x = torch.linspace(0.0, 1.0, 8 * NUM_UPDATES).reshape(-1, 2)
    x[4 * BAD + 3] = torch.inf
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduled else None
    recipe = {
        "num_shards": 2,
        "loss_fn": loss_of,
        "scheduler": scheduler,
        "loss_scale": ls.DynamicLossScale(),
    }
    return skipping(ls.BatchIterator(TensorDataset(x), 4), optimizer, model, **{**recipe, **options})


def with_an_expanded_buffer() -> nn.Module:
    model = small_model()
    model.register_buffer("odd", torch.ones(1).expand(3))
    return model


OVER_RANKS = "the processes report every attempt to each other"
WEIGHTS = "whether a shard takes part depends on a weight that is a tensor"
ALONE: dict[str, Callable[[], ls.ParallelUpdater]] = {
    "on_overflow='retry' decides on the host whether there is another attempt": (
        lambda: updater_of(on_overflow="retry", on_exhausted="skip", max_tries=2)
    ),
    "AdamW has a hook of its step that may do more than change gradients": lambda: updater_of(reads=True),
    "a scheduler counts applied updates on the host": lambda: updater_of(scheduled=True),
    "OnlyAfter does not override after_on_device": lambda: updater_of(loss_scale=OnlyAfter(8.0)),
    WEIGHTS: lambda: updater_of(loss_fn=weighed),
    "the buffer 'odd' is not a plain dense tensor": lambda: updater_of(model=with_an_expanded_buffer()),
}
"""For each reason that a process alone can have an updater that has this reason only."""


@pytest.mark.parametrize("reason", ALONE)
def test_each_reason_is_given_alone(reason: str) -> None:
    with finalized(ALONE[reason]()) as updater:
        # What a loss function returns is known once it has been called.
        assert updater.why_it_waits == (None if reason == WEIGHTS else reason)
        updater.update()
        assert updater.why_it_waits == reason
        assert list(updater._parts.committer.deferral.reasons(("main",))) == [reason]


def test_buffers_without_numbers_are_no_reason() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    with finalized(updater_of(model=model)) as updater:
        for _ in range(2):
            assert updater.why_it_waits is None
            updater.update()


def skipped() -> tuple[str | None, dict[str, Any]]:
    updater = updater_of()
    return updater.why_it_waits, told(updater, NUM_UPDATES)


def test_over_ranks_every_check_is_read_and_bad_updates_are_left_out_the_same() -> None:
    why, alone = skipped()
    assert why is None
    assert alone["applied"] == [number != BAD for number in range(NUM_UPDATES)]
    # Only the last rank computes the shard that is not finite.
    assert launch_on_ranks(skipped, 2) == [(OVER_RANKS, alone)] * 2
