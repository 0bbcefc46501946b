"""The ordered sum over ranks has the bits of one process, however shards, buckets and ranks lie."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lockstep import Communicator, digest
from lockstep.communicators import Contribution, PendingSum, ProcessCommunicator
from lockstep.communicators.failures.watch import Watch
from lockstep.communicators.sums.ordered_sum import OrderedSum
from lockstep.communicators.sums.planning import PlanSizes
from lockstep.communicators.transport.channel import Channel
from lockstep.errors import OrderError
from lockstep.tree import PartialSum, ShardSum, Tensors, total
from tests.support.ranks import run_on_ranks

CASES = 12
"""Each combination of the properties of a case, which come again after 2, 3 and 4 cases."""
MORE_CASES = 24
SIZES = [PlanSizes(), PlanSizes(slice=4096, direct=512, whole=0), PlanSizes(slice=512, direct=10**9, whole=0)]
"""The usual cuts; many buckets, with pieces sent from where they lie; many buckets of copied pieces."""

DAILY_SIZES = {1, 2, 3}
"""The sizes of groups that are looked at daily; larger ones are long."""

SHAPES = [(900,), (3, 5), (40, 30), (0,), (7,), (2, 3, 4, 5), (1,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def leaf(case: int, shard: int) -> Tensors:
    """The tensors of one shard, of which some are absent and some lie transposed in memory."""
    rng = random.Random(1000 * case + shard)  # noqa: S311 - no secret
    generator = torch.Generator().manual_seed(1000 * case + shard)
    tensors: Tensors = []
    for index, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-8, 8, shape, generator=generator)
        values = values.to(DTYPES[(case + index) % 3 if case % 4 == 0 else 0])
        if index == 2 and case % 3 == 0:
            values = values.t().contiguous().t()
        absent = case % 2 == 1 and (index == 4 or rng.random() < 0.3)
        tensors.append(None if absent else values)
    return tensors


def layout(case: int, size: int) -> tuple[int, list[int], set[int]]:
    """How many shards a case has, where they are cut over ranks, and which of them take no part."""
    rng = random.Random(case)  # noqa: S311 - no secret
    num_shards = rng.randint(1, 20)
    cuts = sorted(rng.randint(0, num_shards) for _ in range(size - 1))
    absent = {shard for shard in range(1, num_shards) if case % 3 == 2 and rng.random() < 0.2}
    return num_shards, [0, *cuts, num_shards], absent


def shard_sum(case: int, start: int, stop: int, absent: set[int]) -> ShardSum:
    place = ShardSum(first=start)
    for shard in range(start, stop):
        if shard not in absent:
            place.push(shard, leaf(case, shard))
    return place


def one_process(case: int, size: int) -> Tensors:
    """The specification."""
    num_shards, _, absent = layout(case, size)
    return total(shard_sum(case, 0, num_shards, absent).partials)


def alike(left: Tensors, right: Tensors) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def sum_cases(communicator: ProcessCommunicator) -> list[str]:
    """Sum every case in every way; give those that came out differently."""
    wrong = []
    for case in range(CASES if communicator.size in DAILY_SIZES else MORE_CASES):
        _, cuts, absent = layout(case, communicator.size)
        like = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in full_leaf(case)]
        expected = one_process(case, communicator.size)
        for sizes in SIZES:
            communicator._sizes = sizes
            partials = [
                shard_sum(case, cuts[rank], cuts[rank + 1], absent).partials for rank in range(communicator.size)
            ]
            contributions = [Contribution.of(each) for each in partials]
            mine = partials[communicator.rank]
            if case // 2 % 2:
                got = communicator.sum_partials(mine, contributions, like)
            else:
                got = piecemeal(communicator.begin_sum(contributions, like), mine, len(like))
            if not alike(got, expected):
                wrong.append(f"case {case}, {sizes}")
    return wrong


def piecemeal(pending: PendingSum, partials: list[PartialSum], num_tensors: int) -> Tensors:
    """Bring tensors one by one, each in its time."""
    for index in reversed(range(num_tensors)):
        pending.add(index, [each.tensors[index] for each in partials])
        if index % 3 == 0:
            time.sleep(0.0005)
    return pending.finish()


def full_leaf(case: int) -> list[torch.Tensor]:
    """Tensors as a case has them, none absent."""
    dtypes = [DTYPES[(case + index) % 3 if case % 4 == 0 else 0] for index in range(len(SHAPES))]
    return [torch.empty(shape, dtype=dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def value_of(rank: int) -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(rank))


def orders(communicator: Communicator) -> dict[str, bool]:
    """Add up one tensor of each rank in three orders; tell which have the tree's bits."""
    every = [value_of(rank) for rank in range(communicator.size)]
    (expected,) = total([PartialSum(rank, [value.clone()]) for rank, value in enumerate(every)])
    ordered, unordered = value_of(communicator.rank), value_of(communicator.rank)
    communicator.all_reduce([ordered])
    communicator.all_reduce([unordered], ordered=False)
    folded = every[0].clone()
    for value in every[1:]:
        folded += value
    values = {"ordered": ordered, "unordered": unordered, "left fold": folded}
    return {name: torch.equal(value, expected) for name, value in values.items()}


def count_bytes(communicator: ProcessCommunicator, nodes: int, size: int) -> int:
    """Sum one tensor of which each rank has so many partial sums; give what this rank has sent for it."""
    first = nodes * communicator.rank
    contributions = [
        Contribution(tuple(range(nodes * rank, nodes * (rank + 1))), (1,) * nodes) for rank in range(communicator.size)
    ]
    partials = [PartialSum(first + node, [torch.ones(size)]) for node in range(nodes)]
    before = communicator.bytes_sent
    piecemeal(communicator.begin_sum(contributions, [torch.empty(size)]), partials, 1)
    return communicator.bytes_sent - before


def start_early(communicator: ProcessCommunicator) -> bool:
    """Add one of two tensors; return whether it is on its way before the other has been added."""
    if communicator.size == 1:
        return False
    share = 8192 // communicator.size  # so that each tensor is a bucket
    communicator._sizes = PlanSizes(slice=4 * share, direct=512, whole=0)
    length = 3000 if communicator.size > 2 else 100_000  # two ranks send longer ones alone
    contributions = [Contribution((rank,), (0b11,)) for rank in range(communicator.size)]
    pending = communicator.begin_sum(contributions, [torch.empty(length), torch.empty(length)])
    before = communicator.bytes_sent
    pending.add(1, [torch.ones(length)])
    deadline = time.monotonic() + 240
    while communicator.bytes_sent == before and time.monotonic() < deadline:
        time.sleep(0.001)
    early = communicator.bytes_sent > before
    pending.add(0, [torch.ones(length)])
    return early and all(bool((tensor == communicator.size).all()) for tensor in pending.finish())


def give_up(communicator: ProcessCommunicator) -> list[str]:
    """Announce more than rank 0 then has; give what it is told, and what a sum gives afterwards."""
    like = [torch.empty(600), torch.empty(2)]
    contributions = [Contribution((rank,), (0b11,)) for rank in range(communicator.size)]
    pending = communicator.begin_sum(contributions, like)
    pending.add(1, [torch.ones(2)])
    told = []
    if communicator.rank == 0:
        for act in (
            pending.finish,
            lambda: pending.add(1, [torch.ones(2)]),
            lambda: pending.add(0, [None]),
        ):
            with pytest.raises(OrderError) as error:
                act()
            told.append(str(error.value))
        pending.abandon()
    else:
        pending.add(0, [torch.ones(600)])
        pending.finish()
    value = torch.ones(1)
    communicator.all_reduce([value])
    return [*told, str(value.item())]


def order_of_posts(communicator: ProcessCommunicator, must_match: bool) -> list[int]:
    """Sum while rank 0 computes slowly and the others are done; return the tags of what is posted."""
    posted: list[int] = []
    share = 8192 // communicator.size  # so that each tensor is a bucket
    communicator._sizes = PlanSizes(slice=4 * share, direct=512, whole=0)
    contributions = [Contribution((2 * rank, 2 * rank + 1), (0b11111,) * 2) for rank in range(communicator.size)]
    post, run = Channel.post, OrderedSum._run

    def run_at_last(total: OrderedSum) -> None:
        while communicator.rank > 0 and any(total._missing):
            time.sleep(0.001)
        run(total)

    with pytest.MonkeyPatch.context() as patch:
        if must_match:
            patch.setattr(Channel, "posts_must_match", True)
        patch.setattr(Channel, "post", lambda *each: posted.append(each[-1]) or post(*each))
        patch.setattr(OrderedSum, "_run", run_at_last)
        pending = communicator.begin_sum(contributions, [torch.empty(2048)] * 5)
        for index in reversed(range(5)):
            pending.add(index, [torch.ones(2048), torch.ones(2048)])
            if communicator.rank == 0:
                before, deadline = len(posted), time.monotonic() + 0.3
                while len(posted) < before + 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
        assert all(bool((tensor == 2 * communicator.size).all()) for tensor in pending.finish())
    return posted


@pytest.mark.parametrize("size", [2, 3])
def test_posts_have_one_order_on_ranks_of_any_speed_where_they_must_match(size: int) -> None:
    first, *others = run_on_ranks(order_of_posts, size, True)
    assert others == [first] * (size - 1)
    assert len(first) == 10
    # Otherwise each rank sends first what is ready first.
    first, *others = run_on_ranks(order_of_posts, size, False)
    assert first not in others


ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def compress(group: dist.ProcessGroup) -> dict[str, tuple[float, list[str], float]]:
    """Sum with each compression, added up by owners and by all.

    Gives the largest error as a share of the bound, digests of the sums, and the share of the usual bytes.
    """
    every = [value_of(rank) for rank in range(group.size())]
    exact = sum(value.double() for value in every)
    magnitude = sum(value.double().abs() for value in every) + exact.abs()
    found = {}
    for name, rounding in ROUNDING.items():
        plain = ProcessCommunicator(group, watch=Watch())
        communicator = ProcessCommunicator(group, compression=name, watch=Watch())
        share, digests, before = 0.0, list[str](), (0, 0)
        for sizes in SIZES:
            if sizes is SIZES[1]:  # what comes before is sent by one collective where it is not compressed
                before = communicator.bytes_sent, plain.bytes_sent
            for each in (plain, communicator):
                each._sizes = sizes
                contributions = [Contribution((rank,), (1,)) for rank in range(group.size())]
                mine = [PartialSum(group.rank(), [value_of(group.rank())])]
                (got,) = each.sum_partials(mine, contributions, [torch.empty(5000)])
            share = max(share, ((got - exact).abs() / (rounding * 1.01 * magnitude)).max().item())
            digests.append(digest(got))
        sent = (communicator.bytes_sent - before[0]) / max(plain.bytes_sent - before[1], 1)
        found[name] = (share, digests, sent)
    return found


NUM_ELEMENTS = 2**20


@dataclass(frozen=True)
class Seen:
    """What one rank of a group of some size saw."""

    wrong: list[str]
    orders: dict[str, bool]
    sent: dict[int, int]
    told: list[str]
    compressed: dict[str, tuple[float, list[str], float]]
    early: bool


def look(communicator: ProcessCommunicator) -> Seen:
    """Do everything once."""
    sent = {nodes: count_bytes(communicator, nodes, NUM_ELEMENTS) for nodes in (1, 2)}
    wrong, found = sum_cases(communicator), orders(communicator)
    told, compressed = give_up(communicator), compress(dist.group.WORLD)
    return Seen(wrong, found, sent, told, compressed, start_early(communicator))


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> list[Seen]:
    """What each rank of a group saw."""
    return run_on_ranks(look, request.param)


def on_ranks(*sizes: int) -> pytest.MarkDecorator:
    """Run a test on what groups of some sizes saw."""
    marks = {size: () if size in DAILY_SIZES else pytest.mark.slow for size in sizes}
    return pytest.mark.parametrize("seen", [pytest.param(size, marks=marks[size]) for size in sizes], indirect=True)


@on_ranks(1, 2, 3, 4, 5, 6)
def test_any_layout_over_ranks_has_the_bits_of_one_process(seen: list[Seen]) -> None:
    assert [rank.wrong for rank in seen] == [[]] * len(seen)


@on_ranks(2, 3, 4, 5, 6)
@pytest.mark.parametrize("name", ROUNDING)
def test_compression_halves_the_bytes_within_its_error_and_all_ranks_agree(seen: list[Seen], name: str) -> None:
    share, _, sent = seen[0].compressed[name]
    assert 0.05 < share <= 1.0
    assert sent == pytest.approx(0.5, rel=0.03)  # a scale for each message
    assert len({tuple(rank.compressed[name][1]) for rank in seen}) == 1


@on_ranks(2, 3, 4, 5, 6)
def test_a_bucket_is_sent_before_the_next_has_been_made(seen: list[Seen]) -> None:
    assert all(rank.early for rank in seen)


@on_ranks(1, 2, 3, 4, 5, 6)
def test_a_rank_that_gives_up_holds_nobody_up(seen: list[Seen]) -> None:
    assert seen[0].told == [
        "All announced terms must be added before `finish`, but those of tensor 0 were not.",
        "`add` must get every announced term once, but a term of tensor 1 was not announced, or was added before.",
        "`add` must get every announced term once, but a term of tensor 0 is missing.",
        str(float(len(seen))),
    ]
    assert all(rank.told == [str(float(len(seen)))] for rank in seen[1:])


@on_ranks(2)
def test_two_ranks_may_add_in_any_order(seen: list[Seen]) -> None:
    assert [rank.orders for rank in seen] == [{"ordered": True, "unordered": True, "left fold": True}] * 2


@on_ranks(3, 4, 5, 6)
def test_the_law_is_not_empty_other_orders_give_other_bits(seen: list[Seen]) -> None:
    # A left fold over three is the tree.
    expected = {"ordered": True, "unordered": False, "left fold": len(seen) == 3}
    assert [rank.orders for rank in seen] == [expected] * len(seen)


@on_ranks(2, 3, 4, 5, 6)
@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_sent_are_those_of_a_ring_where_each_rank_has_one_node(seen: list[Seen], nodes: int) -> None:
    ring = 2 * (len(seen) - 1) / len(seen) * NUM_ELEMENTS * 4
    for rank in seen:
        assert rank.sent[nodes] == pytest.approx((nodes + 1) / 2 * ring, rel=1e-3)  # slices differ by 64
