"""Gradients sent during backward: the bits of one process, whatever ranks have instead of the prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.updaters.ranks import rank_sum
from lockstep.updaters.ranks.rank_sum import REPEATS_BEFORE_PREDICTION, RankSum
from tests.support.backward import in_backward
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized, state_digest

FIRST = REPEATS_BEFORE_PREDICTION
"""The first update, counted from 0, whose gradients are sent early."""
DISTURBED = FIRST + 2
"""The update in which something else happens."""
NUM_UPDATES = FIRST + 5
BATCH_SIZE = 12
OPENING = DISTURBED % 2 * BATCH_SIZE
"""The first sample of the disturbed update's batch, in the first shard of the first rank."""
MARKED = OPENING + BATCH_SIZE - 1
"""The last one, in the last shard of the last rank."""


WIDTH = 200
MESSAGE = 4 * WIDTH
"""Bytes of gradients that ride with a message here, fewer than those of one layer."""


class Net(nn.Module):
    """Too many parameters to ride with a message, and a layer that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, way: str = "plain") -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if way == "reentrant":  # backward inside of backward, twice for the same parameters
            for _ in range(2):
                hidden = checkpoint(self.middle, hidden, use_reentrant=True)
        else:
            hidden = self.middle(hidden)
        if way == "spare":
            hidden = self.spare(hidden)
        return self.last(torch.relu(hidden))


def boom(_: torch.Tensor) -> None:
    raise ValueError("boom in backward")


class Disturbed:
    """A loss function that does something else in one update, in the shard that has the marked sample."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.update = 0
        self.calls = 0

    def __call__(self, model: Any, x: torch.Tensor, samples: torch.Tensor) -> Any:
        sample = OPENING if self.what == "spare, in an earlier shard" else MARKED
        marked = self.update == DISTURBED and bool((samples == sample).any())
        self.calls += marked
        way = self.what.partition(",")[0] if marked else "plain"
        out = model(x, way)
        if marked and self.what == "raise":
            out = in_backward(out, boom)
        if marked and self.what == "overflow" and self.calls == 1:
            out = in_backward(out, lambda grad: grad * float("inf"))  # above a scale of 1
        loss = nn.functional.cross_entropy(out, samples % 3)
        return ls.Loss(loss, weight=0 if marked and self.what == "no weight" else None)


def disturbed(what: str, devices: Sequence[str] = ("cpu",), **options: Any) -> dict[str, Any]:
    """Train, and tell how it ended and how many gradients were there before the ranks met."""
    early: list[int] = []
    plain = RankSum.exchange

    def exchange(total: RankSum, message: Any) -> Any:
        replies = plain(total, message)
        if total._summed is not None:
            early.append(loss_fn.update)
        return replies

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, loss_fn, raised = Net().to(devices[0]), Disturbed(what), ""
    data = TensorDataset(torch.randn(2 * BATCH_SIZE, 4), torch.arange(2 * BATCH_SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankSum, "exchange", exchange)
        patch.setattr(rank_sum, "SMALL_BYTES", MESSAGE)
        updater = ls.ParallelUpdater(
            ls.BatchIterator(data, BATCH_SIZE, shuffle=False),
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            model,
            devices=list(devices),
            num_shards=8,
            loss_fn=loss_fn,
            loss_scale=ls.DynamicLossScale(factor=8.0) if what == "overflow" else None,
            **options,
        )
        with finalized(updater):
            while updater.iteration < NUM_UPDATES:
                loss_fn.update = updater.iteration
                try:
                    updater.update()
                except Exception as error:  # noqa: BLE001 - what is raised is the answer
                    raised, loss_fn.what = f"{type(error).__name__}: {error}", "nothing"
            return {"end": state_digest(updater), "early": early, "raised": raised, "calls": loss_fn.calls}


WHATS = ["nothing", "spare", "spare, in an earlier shard", "reentrant", "raise", "no weight", "overflow"]
ON_TWO_DEVICES = ["spare", "raise", "overflow"]
"""Gradients that were sent in vain, that never come, and that come twice, where those of two devices are merged."""


def all_of_them() -> dict[str, dict[str, Any]]:
    return {
        "watched": disturbed("nothing", timeout=60.0),  # backward is another thread's
        **{what: disturbed(what) for what in WHATS},
        **{f"{what}, on two devices": disturbed(what, ["cpu"] * 2) for what in ON_TWO_DEVICES},
    }


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def found(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return launch_on_ranks(all_of_them, request.param)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return all_of_them()


def test_the_bits_are_those_of_one_process(found: Any, alone: Any) -> None:
    for rank in found:
        assert {what: each["end"] for what, each in rank.items()} == {what: each["end"] for what, each in alone.items()}


BEFORE = [FIRST, FIRST + 1]
AFTER = [FIRST + 3, FIRST + 4]
CHECKS: dict[str, Callable[[list[int]], bool]] = {
    "nothing": lambda early: early == [*BEFORE, DISTURBED, *AFTER],
    "watched": lambda early: early == [*BEFORE, DISTURBED, *AFTER],
    "spare": lambda early: early[:2] == BEFORE and DISTURBED not in early,
    "spare, in an earlier shard": lambda early: early[:2] == BEFORE and DISTURBED not in early,
    "reentrant": lambda early: early[:2] == BEFORE and DISTURBED not in early,
    "raise": lambda early: early[:2] == BEFORE,
    "no weight": lambda early: early[:2] == BEFORE and DISTURBED not in early,
    "overflow": lambda early: early == [*BEFORE, DISTURBED, DISTURBED, *AFTER],
}


def test_gradients_are_sent_early_where_the_prediction_is_right(found: Any) -> None:
    for rank in found:
        early = {what: each["early"] for what, each in rank.items()}
        assert [what for what in early if not CHECKS[what.removesuffix(", on two devices")](early[what])] == [], early


def test_a_shard_whose_gradients_were_given_away_in_vain_is_computed_anew(found: Any) -> None:
    assert sum(rank["spare"]["calls"] for rank in found) == 2
    assert sum(rank["overflow"]["calls"] for rank in found) == 2  # the retry's


def test_an_error_in_backward_of_one_rank_is_told_to_all(found: Any) -> None:
    for what in ("raise", "raise, on two devices"):
        raised = [rank[what]["raised"] for rank in found]
        assert all("boom in backward" in each for each in raised)
        assert sum(each.startswith("ReplicaError") for each in raised) == 1
        assert sum(each.startswith("PeerError") for each in raised) == len(found) - 1
