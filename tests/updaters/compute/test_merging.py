"""Large gradients that are added to earlier sums during backward: the same bits, with fewer gradients held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep import Communicator
from lockstep.updaters.compute import early_send
from lockstep.updaters.ranks import rank_sum
from tests.support.programs.sharding import RUNS, advance, updater_of
from tests.support.ranks import run_on_ranks
from tests.support.runs import Placement, finalized, train
from tests.support.workloads import CONVNET, MLP, Workload

NEVER = 1 << 40


@pytest.mark.parametrize("work", [MLP, CONVNET], ids=["mlp", "convnet"])
@pytest.mark.parametrize("num_shards", [5, 8])
def test_merging_changes_no_bit(work: Workload, num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_send, "LARGE", NEVER)
    expected = train(work, num_shards=num_shards, updates=4)
    monkeypatch.setattr(early_send, "LARGE", 1)
    for num_devices in (1, 2, 3):
        assert train(work, Placement(num_devices), num_shards=num_shards, updates=4) == expected


def test_merging_changes_no_bit_over_ranks_with_and_without_early_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_send, "LARGE", NEVER)
    run = RUNS["AdamW, foreach"]
    with finalized(updater_of(run, 1, shard=False)) as updater:
        expected = advance(run, updater, 6)
    assert run_on_ranks(_merged, 2) == [{True: expected, False: expected}] * 2


def _merged(communicator: Communicator) -> dict[bool, str]:
    run, found = RUNS["AdamW, foreach"], {}
    for early in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(early_send, "LARGE", 1)
            patch.setattr(rank_sum, "SMALL_BYTES", 0)
            patch.setattr(rank_sum, "REPEATS_BEFORE_PREDICTION", 2 if early else NEVER)
            with finalized(updater_of(run, 1, shard=True, communicator=communicator)) as updater:
                found[early] = advance(run, updater, 6)
    return found


def test_each_gradient_is_freed_once_it_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, last = model.children()
        hidden = first(x)
        # Backward comes here when it has computed the gradients of the last layer.
        hidden.register_hook(lambda _: held.append(next(last.parameters()).grad is not None))
        loss: torch.Tensor = last(hidden).square().mean()
        return loss

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for large, expected in ((1, [1, 0, 1, 0]), (NEVER, [1, 1, 1, 1])):
        monkeypatch.setattr(early_send, "LARGE", large)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = ls.BatchIterator(torch.ones(8, 3), 8)
        with finalized(ls.StandardUpdater(batches, sgd, model, num_shards=4, loss_fn=counted)) as updater:
            # The first update reads the gradients of a shard, which it computes twice.
            updater.update()
            held.clear()
            updater.update()
        assert held == expected


def test_a_gradient_that_backward_adds_to_twice_is_summed_in_the_usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for large in (NEVER, 1):
        monkeypatch.setattr(early_send, "LARGE", large)
        torch.manual_seed(3)
        model = Twice()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = ls.BatchIterator(torch.randn(32, 5, generator=torch.Generator().manual_seed(4)), 16)
        with finalized(ls.StandardUpdater(batches, sgd, model, num_shards=8, loss_fn=square)) as updater:
            tries = [updater.update().tries for _ in range(3)]
            # The order is only noticed once, and the shards run again.
            assert tries == [1, 1, 1]
            digests.append(ls.digest(model))
    assert digests[0] == digests[1]


class Twice(nn.Module):
    """Uses a layer in two segments that reentrant checkpoints compute again, each with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.segment, x, use_reentrant=True)
        return x

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: Any = model(x).square().mean()
    return loss  # type: ignore[no-any-return]
