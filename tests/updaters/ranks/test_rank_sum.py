"""The sum over ranks: the same bits with the message, after it and during backward, and each where it belongs."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.communicators import MessageTable, PendingSum
from lockstep.tree import Tensors
from lockstep.updaters.ranks import rank_reduction
from lockstep.updaters.ranks.rank_sum import REPEATS_BEFORE_PREDICTION, SMALL_BYTES, SMALL_BYTES_OVER_NETWORK
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized, state_digest

NUM_UPDATES = REPEATS_BEFORE_PREDICTION + 4
WIDTHS = {"small": 5, "medium": 180, "large": 600}
"""Hidden units of models whose gradients fit into any message, into those within a machine, and into none."""
SIZES = ["small", "large"]
DEVICES = [1, 2]


class Counting(ls.ProcessCommunicator):
    """Counts in which ways gradients travel; buffers, which are not compressed, are none."""

    def __init__(self) -> None:
        super().__init__(watch=ls.find_communicator().watch)
        self.ways = Counter[str]()

    def sum_partials(self, *arguments: Any, compress: bool = True, **options: Any) -> Tensors:
        self.ways["after"] += compress
        return super().sum_partials(*arguments, compress=compress, **options)

    def begin_sum(self, *arguments: Any, **options: Any) -> PendingSum:
        self.ways["early"] += 1
        return super().begin_sum(*arguments, **options)

    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:
        self.ways["in the message"] += table is not None and table.body_bytes > 0 and len(payload) > 0
        return super().exchange(payload, table)


def trained(
    size: str, num_devices: int, communicator: ls.Communicator | None = None, **options: Any
) -> tuple[str, str]:
    """Train; return the bits of the state, and the last gradients."""
    torch.manual_seed(1)
    width = WIDTHS[size]
    model = nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width)
    )
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data, 12, seed=2),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model,
        devices=["cpu"] * num_devices,
        num_shards=6,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        communicator=communicator,
        **options,
    )
    with finalized(updater):
        for _ in range(NUM_UPDATES):
            updater.update()
        return state_digest(updater), ls.digest([each.grad for each in model.parameters()])


Found = dict[tuple[str, int], tuple[tuple[str, str], Counter[str]]]


def with_all_sizes() -> Found:
    torch.set_num_threads(1)
    found: Found = {}
    for size, num_devices in product(SIZES, DEVICES):
        communicator = Counting()
        bits = trained(size, num_devices, communicator)
        found[size, num_devices] = bits, communicator.ways
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def ranks(request: pytest.FixtureRequest) -> list[Found]:
    return launch_on_ranks(with_all_sizes, request.param)


@pytest.mark.parametrize("size", SIZES)
def test_no_bit_depends_on_when_gradients_are_sent(size: str, ranks: list[Found]) -> None:
    alone = trained(size, 1)
    for found in ranks:
        differing = [key for key, (bits, _) in found.items() if key[0] == size and bits != alone]
        assert not differing
        assert len(found) == len(SIZES) * len(DEVICES)


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_sent_with_the_message_or_during_backward(
    size: str, num_devices: int, ranks: list[Found]
) -> None:
    for found in ranks:
        _, ways = found[size, num_devices]
        if size == "small":
            # The first sum tells how much room is needed.
            expected = {"after": 1, "in the message": NUM_UPDATES - 1}
        else:
            expected = {"after": REPEATS_BEFORE_PREDICTION, "early": NUM_UPDATES - REPEATS_BEFORE_PREDICTION}
        assert +ways == Counter(expected)


def between_machines() -> dict[str, tuple[tuple[str, str], Counter[str]]]:
    torch.set_num_threads(1)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_reduction, "machine_name", lambda: str(ls.find_communicator().rank))
        for size in WIDTHS:
            communicator = Counting()
            found[size] = trained(size, 1, communicator), communicator.ways
    return found


def test_between_machines_only_very_small_gradients_travel_in_the_message() -> None:
    for found in launch_on_ranks(between_machines, 2):
        assert {size: ways["in the message"] > 0 for size, (_, ways) in found.items()} == {
            "small": True,
            "medium": False,
            "large": False,
        }


def test_models_are_as_large_as_they_are_called() -> None:
    assert (
        SMALL_BYTES_OVER_NETWORK < 4 * WIDTHS["medium"] ** 2 < SMALL_BYTES // 4 < SMALL_BYTES < 4 * WIDTHS["large"] ** 2
    )


class Skipping(nn.Module):
    """Leaves out its first layer for samples that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.second(x if bool(skip.all()) else self.first(x))


def skipping(communicator: ls.Communicator | None = None) -> str:
    """Train, where the fifth update leaves out a layer on all ranks."""
    torch.manual_seed(1)
    model = Skipping()
    at = torch.arange(12 * NUM_UPDATES) // 12
    data = torch.utils.data.TensorDataset(torch.randn(len(at), 600), at == NUM_UPDATES - 2, at % 3)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data, 12, shuffle=False),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model,
        devices=["cpu"],
        num_shards=6,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        communicator=communicator,
    )
    with finalized(updater):
        for _ in range(NUM_UPDATES):
            updater.update()
        return state_digest(updater)


def skipping_on_ranks() -> tuple[str, int]:
    torch.set_num_threads(1)
    communicator = Counting()
    return skipping(communicator), communicator.ways["early"]


@pytest.mark.usefixtures("one_intra_op_thread")
def test_gradients_that_no_rank_has_after_others_were_sent_are_computed_again() -> None:
    alone = skipping()
    for digest, early in launch_on_ranks(skipping_on_ranks, 2):
        assert digest == alone
        assert early > 1
