"""Gradients on accelerators that are sent during backward: the bits of one process, no race, and the order of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.communicators.sums.ordered_sum import OrderedSum
from lockstep.communicators.sums.planning import PlanSizes
from lockstep.communicators.transport.channel import Channel
from lockstep.updaters.compute import early_send
from lockstep.updaters.compute.early_send import EarlySend
from lockstep.updaters.ranks import rank_sum
from tests.support.emulated import observed
from tests.support.emulated.pool import POOL, build_or_skip
from tests.support.ranks import run_on_ranks
from tests.support.runs import OPTIMIZERS, cross_entropy, finalized, state_digest
from tests.support.waiting import await_true
from tests.support.workloads import Workload
from tests.updaters.compute.test_early_send import CHECKS, WHATS, disturbed

BATCH_SIZE = 13
NUM_EARLY = 2
NUM_UPDATES = rank_sum.REPEATS_BEFORE_PREDICTION + NUM_EARLY
ONE, TWO = ("emulated:1",), ("emulated:0", "emulated:1")
MIXED = [("cpu", "emulated:0"), ("emulated:1", "emulated:1")]
CUTS = {
    "buckets": PlanSizes(slice=2048, direct=512, whole=0),
    "copied": PlanSizes(slice=1024, direct=10**9, whole=0),
    "one": PlanSizes(whole=0),
}
"""Many buckets, with pieces that are sent from where they are; many of copied pieces; one bucket."""


def _deep() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 61), nn.Tanh(), nn.Linear(61, 71), nn.GELU(), nn.LayerNorm(71)),
        *(nn.Linear(71, 33), nn.Mish(), nn.Linear(33, 3)),
    )


DEEP = Workload("deep", _deep, (6,))


@dataclass
class Seen:
    """What one rank saw of a run.

    Attributes:
        end: The digest of the final state.
        races: The races that the devices recorded.
        early: The number of sums of which a bucket was sent before backward had computed the last gradient.
    """

    end: str
    races: list[str]
    early: int


def train(
    communicator: ls.ProcessCommunicator | None,
    devices: Sequence[str],
    num_shards: int,
    cut: str = "buckets",
    *,
    frozen: bool = False,
    patch: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    **options: Any,
) -> Seen:
    """Train; backward waits before the last gradient of a sum of several buckets until one has been sent."""
    early: set[OrderedSum] = set()
    plain = EarlySend.add

    def add(send: EarlySend, *arguments: Any) -> None:
        pending: Any = send._pending
        if len(send._given) == 1 and len(pending._transfers) > 1:
            await_true(lambda: pending._sent > 0)
            early.add(pending)
        plain(send, *arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        # Nothing fits into a message.
        monkeypatch.setattr(rank_sum, "SMALL_BYTES", 0)
        monkeypatch.setattr(EarlySend, "add", add)
        if communicator is not None:
            communicator._sizes = CUTS[cut]
        patch(monkeypatch)
        model = DEEP.model().to(devices[0])
        model[0].requires_grad_(not frozen)
        batches = ls.BatchIterator(DEEP.data(BATCH_SIZE), BATCH_SIZE, shuffle=False)
        updater = ls.ParallelUpdater(
            batches,
            OPTIMIZERS["sgd"](model),
            model,
            devices=list(devices),
            num_shards=num_shards,
            loss_fn=cross_entropy,
            communicator=communicator,
            **options,
        )
        with finalized(updater), observed() as record:
            for _ in range(NUM_UPDATES):
                updater.update()
            return Seen(state_digest(updater), [race.what for race in record.races], len(early))


def on_ranks(function: Any, size: int, *arguments: Any) -> list[Any]:
    build_or_skip()
    return run_on_ranks(function, size, *arguments, pool=POOL)


def _in_all_cuts(communicator: ls.ProcessCommunicator, devices: Sequence[str], num_shards: int) -> list[Seen]:
    return [train(communicator, devices, num_shards, cut) for cut in CUTS]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [pytest.param(ONE, marks=pytest.mark.slow), TWO], ids=["one", "two"])
@pytest.mark.parametrize("num_shards", [pytest.param(8, marks=pytest.mark.slow), 11])
def test_any_ranks_devices_and_cuts_give_the_bits_of_one_process(
    size: int, devices: tuple[str, ...], num_shards: int
) -> None:
    expected = train(None, ["cpu"], num_shards).end
    for seen in on_ranks(_in_all_cuts, size, devices, num_shards):
        assert [each.end for each in seen] == [expected] * len(CUTS)
        assert [each.races for each in seen] == [[]] * len(CUTS)
        assert seen[0].early == NUM_EARLY


def _in_other_ways(communicator: ls.ProcessCommunicator) -> dict[str, Seen]:
    def in_order(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Channel, "posts_must_match", True)

    def not_beside_messages(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(communicator, "sends_early", False)

    return {
        "in the order of NCCL": train(communicator, TWO, 11, patch=in_order),
        "messages by NCCL": train(communicator, TWO, 11, patch=not_beside_messages),
        "the second device alone": train(communicator, TWO, 11, workloads=[0.01, 1.0]),
        **{str(devices): train(communicator, devices, 11) for devices in MIXED},
    }


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_other_ways_and_devices_give_the_bits_of_one_process(size: int) -> None:
    expected = train(None, ["cpu"], 11).end
    for seen in on_ranks(_in_other_ways, size):
        assert {way: (each.end, each.races) for way, each in seen.items()} == dict.fromkeys(seen, (expected, []))
        assert {way for way, each in seen.items() if each.early != NUM_EARLY} == {"messages by NCCL"}


def _partly_frozen(communicator: ls.ProcessCommunicator) -> Seen:
    return train(communicator, TWO, 8, frozen=True)


def test_a_part_of_the_model_may_be_frozen() -> None:
    expected = train(None, ["cpu"], 8, frozen=True).end
    for seen in on_ranks(_partly_frozen, 3):
        assert seen == Seen(expected, [], NUM_EARLY)


def _disturbed(communicator: ls.ProcessCommunicator, devices: Sequence[str], whats: Sequence[str]) -> dict[str, Any]:
    with observed() as record:
        found = {what: disturbed(what, devices, communicator=communicator) for what in whats}
    return {**found, "races": record.races}


@cache
def alone(what: str) -> str:
    """Return the digest of one process."""
    end: str = disturbed(what)["end"]
    return end


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize(
    "whats",
    [pytest.param(["spare", "raise", "overflow"], id="some"), pytest.param(WHATS, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [pytest.param(ONE, marks=pytest.mark.slow), TWO], ids=["one", "two"])
def test_what_was_not_predicted_is_computed_again(size: int, devices: tuple[str, ...], whats: list[str]) -> None:
    for rank in on_ranks(_disturbed, size, devices, whats):
        assert rank.pop("races") == []
        assert {what: each["end"] for what, each in rank.items()} == {what: alone(what) for what in whats}
        assert all(CHECKS[what](each["early"]) for what, each in rank.items()), rank
        assert "boom in backward" in rank["raise"]["raised"]


def _without_waiting(communicator: ls.ProcessCommunicator) -> tuple[int, int]:
    """Return the numbers of races if a sum, or the merge of two devices, reads what backward still writes."""
    take = OrderedSum._take

    def take_at_once(total: OrderedSum, index: int) -> None:
        total._given[index] = total._given[index][0], None
        take(total, index)

    def event_of_nothing(_: object) -> torch.Event:
        return torch.Stream(TWO[1]).record_event()

    first = train(communicator, ONE, 8, patch=lambda patch: patch.setattr(OrderedSum, "_take", take_at_once))
    second = train(communicator, TWO, 8, patch=lambda patch: patch.setattr(early_send, "_event_on", event_of_nothing))
    return len(first.races), len(second.races)


def test_a_missing_wait_is_a_race() -> None:
    assert all(all(races) for races in on_ranks(_without_waiting, 2))
