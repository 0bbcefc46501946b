"""Real processes over gloo: messages, sums, copies, and what tells ranks apart."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import lockstep as ls
from lockstep import Communicator, DisagreementError, LocalCommunicator
from lockstep.communicators import Contribution, MessageTable
from lockstep.tree import PartialSum, Tensors, total
from tests.support.ranks import run_on_ranks


def talk(communicator: Communicator) -> dict[str, object]:
    rank = communicator.rank
    short = communicator.exchange(b"from %d" % rank)
    long = communicator.exchange(bytes([rank]) * 10_000 * rank)
    weights = [torch.full((2, 3), float(rank)), torch.full((4, 2), float(rank)).t()]
    communicator.broadcast(weights, source=1)
    objects = communicator.gather_objects({"rank": rank})
    communicator.barrier()
    communicator.check_same(weights)
    return {"short": short, "long": long, "weights": weights, "objects": objects}


def test_messages_copies_and_objects_reach_every_rank() -> None:
    for got in run_on_ranks(talk, 3):
        assert got["short"] == [b"from 0", b"from 1", b"from 2"]
        assert got["long"] == [b"", b"\1" * 10_000, b"\2" * 20_000]
        assert all(bool((weight == 1.0).all()) for weight in got["weights"])
        assert got["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def partial_sums(shards: list[int], present: list[int]) -> list[PartialSum]:
    """Partial sums that depend on nothing but their first shard."""
    sums = []
    for shard, mask in zip(shards, present, strict=True):
        generator = torch.Generator().manual_seed(shard)
        tensors: Tensors = [torch.randn(shape, generator=generator) for shape in ((5,), (3, 4), (1,))]
        sums.append(PartialSum(shard, [t if mask >> i & 1 else None for i, t in enumerate(tensors)]))
    return sums


LAYOUT = [([0, 4], [0b111, 0b001]), ([], []), ([6, 8], [0b011, 0b001])]
"""What each of three ranks brings: the second nothing, and nobody but rank 0 the third tensor."""


def reduce_layout(communicator: Communicator) -> Tensors:
    contributions = [Contribution(tuple(shards), tuple(present)) for shards, present in LAYOUT]
    like = [torch.empty(5), torch.empty(3, 4), torch.empty(1)]
    mine = partial_sums(*LAYOUT[communicator.rank])
    return communicator.sum_partials(mine, contributions, like)


def test_partial_sums_of_ranks_give_the_bits_of_one_process() -> None:
    every = [sums for layout in LAYOUT for sums in partial_sums(*layout)]
    expected = total(every)
    for got in run_on_ranks(reduce_layout, 3):
        assert all(torch.equal(mine, one) for mine, one in zip(got, expected, strict=True))


def differ(communicator: Communicator) -> str:
    weights = {"a": torch.zeros(3), "b": torch.zeros(2)}
    if communicator.rank == 2:
        weights["b"][1] = -0.0
    with pytest.raises(DisagreementError) as error:
        communicator.check_same(weights)
    return str(error.value)


def test_ranks_that_differ_are_named() -> None:
    messages = run_on_ranks(differ, 3)
    assert messages[0].startswith("Rank 2 holds other bits in 'b' than rank 0.")
    assert len(set(messages)) == 1


def test_a_process_that_is_alone_is_its_own_sum() -> None:
    shards, present = [0, 4, 6], [0b111, 0b001, 0b011]
    expected = total(partial_sums(shards, present))
    sums = partial_sums(shards, present)
    local = LocalCommunicator()
    got = local.sum_partials(sums, [Contribution.of(sums)], expected)
    assert all(torch.equal(mine, one) for mine, one in zip(got, expected, strict=True))


class Unsendable:
    def __reduce__(self) -> str:
        raise RuntimeError("no way to send this")


def send_what_cannot_be_sent() -> None:
    communicator = ls.find_communicator()
    communicator.gather_objects(Unsendable() if communicator.rank == 1 else None)


def listen_on_an_interface_that_is_not_there() -> None:
    if os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    ls.find_communicator()


@pytest.mark.usefixtures("spawned_by_forks")
@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (send_what_cannot_be_sent, "no way to send this"),
        (listen_on_an_interface_that_is_not_there, ".*Unable to find .*nowhere0"),
    ],
)
def test_a_call_that_a_rank_cannot_make_is_no_failure_of_another_rank(main: Callable[[], None], reason: str) -> None:
    with pytest.raises(ls.PeerError, match=f"Rank 1 raised RuntimeError: {reason}") as caught:
        ls.launch(main, 2)
    assert caught.value.rank == 1


def _make_another_call(communicator: ls.Communicator) -> str:
    if communicator.rank:
        communicator.exchange(b"\x80")
        return ""
    with pytest.raises(ls.DisagreementError, match="got another one on rank 1") as caught:
        communicator.exchange_json(1)
    return str(caught.value)


def _exchange_something_else_than_an_update(communicator: ls.Communicator) -> list[int]:
    table = MessageTable(2, body_bytes=2**16)
    communicator.exchange_json("an update", table)
    failed = []
    for call in (communicator.exchange_json, communicator.gather_objects):
        # The message of an update is longer, and the transport would end the process that expects another one.
        with pytest.raises(ls.DisagreementError, match="got another one on rank") as caught:
            communicator.exchange_json("an update", table) if communicator.rank else call("no update")
        failed.append(caught.value.rank)
    return failed


def test_another_call_beside_an_update_is_named_on_both_ranks() -> None:
    assert run_on_ranks(_exchange_something_else_than_an_update, 2) == [[1, 1], [0, 0]]


def test_another_call_of_another_rank_is_named() -> None:
    assert "not under `if trainer.is_main:`" in run_on_ranks(_make_another_call, 2)[0]
