"""One comparison over ranks and one plan of packets: who uses them, and that each fault in them is caught."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import lockstep as ls
from lockstep import DisagreementError, ProcessCommunicator
from lockstep.communicators import Contribution, LocalCommunicator, comparison as comparison_module
from lockstep.communicators.comparison import Difference, StateComparer, check_fields, first_difference
from lockstep.communicators.sums import planning
from lockstep.communicators.transport import packing
from lockstep.communicators.transport.packing import LONG_TENSOR_BYTES, plan_packets
from lockstep.tree import PartialSum
from lockstep.updaters.ranks import coordinator
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized, updater_for
from tests.support.workloads import MLP

# The comparison ------------------------------------------------------------------------------------------

SIZE = 3
DIFFERING = SIZE - 1
"""The only rank that differs is the last, which a comparison with a neighbour or a range too short misses."""


def bits(communicator: ProcessCommunicator, tensors: dict[str, torch.Tensor]) -> None:
    communicator.check_same(tensors)


def fields(communicator: ProcessCommunicator, tensors: dict[str, torch.Tensor]) -> None:
    said = {name: str(tensor.tolist()) for name, tensor in tensors.items()}
    check_fields(communicator, said, what="recipe", remedy="Mend it.")


def state(communicator: ProcessCommunicator, tensors: dict[str, torch.Tensor]) -> None:
    raise StateComparer(lambda: tensors, 1).explain(communicator, 7)


def models(communicator: ProcessCommunicator, tensors: dict[str, torch.Tensor]) -> None:
    model = MLP.model()
    with torch.no_grad():
        dict(model.named_parameters())["0.bias"][:2] += tensors["b"]
    communicator.differing_models = "refuse"
    options = {"num_shards": SIZE, "communicator": communicator}
    with finalized(updater_for(MLP, model=model, **options)) as updater:
        updater.update()


def positions(communicator: ProcessCommunicator, tensors: dict[str, torch.Tensor]) -> None:
    said = json.dumps({name: tensor.tolist() for name, tensor in tensors.items()})
    coordinator._check_positions([json.loads(each) for each in communicator.exchange(said.encode())], [], communicator)


USERS = {"bits": bits, "fields": fields, "state": state, "models": models, "positions": positions}


def ignores_the_last(said: Sequence[dict[str, Any]]) -> Difference | None:
    return first_difference(said[:-1])


def names_a_rank_less(said: Sequence[dict[str, Any]]) -> Difference | None:
    found = first_difference(said)
    return found and Difference(found.rank - 1, found.values, found.rank_0_values, found.names)


COMPARISONS = {
    "as it is": first_difference,
    "the last rank left out": ignores_the_last,
    "another rank named": names_a_rank_less,
}


Found = tuple[int | None, str | None]
"""The rank and the name that an error holds; None where there was no error."""


def find(communicator: ProcessCommunicator) -> dict[tuple[str, str], Found]:
    """Compare by every user with every comparison, with one and with two tensors that differ."""
    found = {}
    for comparison, compare in COMPARISONS.items():
        for name, use in USERS.items():
            for differing in ("b", "ba")[: 1 if use is models else 2]:
                tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
                if communicator.rank == DIFFERING:
                    for each in differing:
                        tensors[each][1] = 0.5
                key = name if differing == "b" else f"two {name}"
                found[comparison, key] = (None, None)
                with pytest.MonkeyPatch.context() as patch:
                    for module in (comparison_module, coordinator):
                        patch.setattr(module, "first_difference", compare)
                    try:
                        use(communicator, tensors)
                    except DisagreementError as error:
                        found[comparison, key] = (error.rank, error.subject)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, str], Found]]:
    return run_on_ranks(find, SIZE)


@pytest.mark.parametrize("name", USERS)
def test_each_comparison_names_the_rank_and_the_tensor_on_every_rank(found: list[Any], name: str) -> None:
    subject = "0.bias" if name == "models" else "b"
    assert [each["as it is", name] for each in found] == [(DIFFERING, subject)] * SIZE


@pytest.mark.parametrize("name", [name for name, use in USERS.items() if use is not models])
def test_of_two_tensors_that_differ_every_rank_names_the_first(found: list[Any], name: str) -> None:
    assert [each["as it is", f"two {name}"] for each in found] == [(DIFFERING, "a")] * SIZE


def test_positions_that_differ_are_listed_in_the_order_of_rank_0() -> None:
    first = {"update": 3, "loss scale": None, "batch sizes": [4]}
    alone = LocalCommunicator()
    coordinator._check_positions([first, dict(reversed(first.items()))], [], alone)
    with pytest.raises(DisagreementError) as raised:
        coordinator._check_positions([first, first, {"batch sizes": [5], "update": 3}], [], alone)
    assert (raised.value.rank, raised.value.subject, raised.value.update) == (2, "loss scale", 3)
    assert str(raised.value) == (
        "Rank 2 must have rank 0's position, but on it loss scale is nothing, not None; batch sizes is [5], not [4]. "
        "Run the same code with the same batches on every rank."
    )


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("mutant", list(COMPARISONS)[1:])
def test_a_fault_in_the_comparison_shows_in_each(found: list[Any], mutant: str, name: str) -> None:
    for each in found:
        assert each[mutant, name] != each["as it is", name]


# The plan of packets -------------------------------------------------------------------------------------

Planner = Callable[..., list[list[int]]]


def like() -> list[torch.Tensor]:
    """Long and short ones of two dtypes, an empty one, and one with gaps."""
    shapes = [(40,), (300, 300), (7, 3), (0,), (100_000,), (5,), (300, 400)]
    made = [torch.empty(shape) for shape in shapes]
    made[2] = made[2].double()
    made[6] = made[6].t()
    return made


def values(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in like()]


def laid_out(communicator: ProcessCommunicator) -> list[torch.Tensor]:
    """The rank's tensors, of which one lies otherwise in memory on every other rank."""
    mine = values(communicator.rank)
    if communicator.rank % 2:
        mine[6] = mine[6].t().contiguous().t()
    return mine


def all_reduced(communicator: ProcessCommunicator) -> list[torch.Tensor]:
    mine = laid_out(communicator)
    communicator.all_reduce(mine, ordered=False)
    return mine


def broadcast(communicator: ProcessCommunicator) -> list[torch.Tensor]:
    mine = laid_out(communicator)
    communicator.broadcast(mine, source=1)
    return mine


def summed(communicator: ProcessCommunicator) -> list[torch.Tensor | None]:
    mine = laid_out(communicator)
    everything = (1 << len(mine)) - 1
    both = [Contribution((rank,), (everything,)) for rank in range(communicator.size)]
    return communicator.sum_partials([PartialSum(communicator.rank, list(mine))], both, like())


def added(communicator: ProcessCommunicator) -> list[torch.Tensor | None]:
    """Bring tensors as backward makes them, the last first; each long one is to be on its way at once."""
    mine = laid_out(communicator)
    everything = (1 << len(mine)) - 1
    both = [Contribution((rank,), (everything,)) for rank in range(communicator.size)]
    pending = communicator.begin_sum(both, like())
    early = []
    for index in reversed(range(len(mine))):
        before = communicator.bytes_sent
        pending.add(index, [mine[index]])
        early.append(communicator.bytes_sent > before)
    return [*pending.finish(), torch.tensor(early[0])]


SENDERS = {"all_reduce": all_reduced, "broadcast": broadcast, "sum_partials": summed, "begin_sum": added}


def expected(name: str) -> list[torch.Tensor]:
    one, two = values(0), values(1)
    sums = [left + right for left, right in zip(one, two, strict=True)]
    early = [torch.tensor(True)]
    return two if name == "broadcast" else sums + (early if name == "begin_sum" else [])


def in_another_order_on_rank_1(rank: int) -> Planner:
    def plan(like: Sequence[torch.Tensor], order: Iterable[int], **sizes: int) -> list[list[int]]:
        packets = plan_packets(like, order, **sizes)
        return [packet[::-1] for packet in packets] if rank == 1 else packets

    return plan


def backwards(rank: int) -> Planner:  # noqa: ARG001 - the same on all ranks
    return lambda like, order, **sizes: plan_packets(like, order, **sizes)[::-1]


def without_the_last(rank: int) -> Planner:  # noqa: ARG001 - the same on all ranks
    return lambda like, order, **sizes: plan_packets(like, order, **sizes)[:-1]


PLANNERS: dict[str, tuple[Callable[[int], Planner], set[str]]] = {
    "as it is": (lambda _: plan_packets, set()),
    "another order on one rank": (in_another_order_on_rank_1, set(SENDERS)),
    "the last packet first": (backwards, {"begin_sum"}),
    "a packet left out": (without_the_last, set(SENDERS)),
}
"""Plans, and the ways to send in which each must show; an order that all ranks share changes no sum."""


def send(communicator: ProcessCommunicator) -> dict[str, set[str]]:
    """Send in every way by every plan; give for each plan where something came out differently."""
    differing: dict[str, set[str]] = {name: set() for name in PLANNERS}
    for plan, (planner, _) in PLANNERS.items():
        for name, act in SENDERS.items():
            with pytest.MonkeyPatch.context() as patch:
                for module in (packing, planning):
                    patch.setattr(module, "plan_packets", planner(communicator.rank))
                planning.plan_sum.cache_clear()
                got = act(communicator)
            if ls.digest(got) != ls.digest(expected(name)):
                differing[plan].add(name)
    planning.plan_sum.cache_clear()
    return differing


def test_tensors_reach_all_ranks_whole_and_a_fault_in_the_plan_shows() -> None:
    wanted = {name: senders for name, (_, senders) in PLANNERS.items()}
    first, second = run_on_ranks(send, 2)
    assert {name: first[name] | second[name] for name in PLANNERS} == wanted


SHAPES = st.lists(st.tuples(st.integers(0, 3 * LONG_TENSOR_BYTES // 8), st.booleans()), max_size=24)


@given(
    SHAPES,
    st.integers(1, 4 * LONG_TENSOR_BYTES),
    st.integers(1, 2 * LONG_TENSOR_BYTES),
    st.randoms(use_true_random=False),
)
def test_every_tensor_is_in_one_packet_in_order_and_no_packet_is_too_long(
    described: list[tuple[int, bool]], limit: int, alone: int, random: Any
) -> None:
    tensors = [torch.empty(size, dtype=torch.float64 if wide else torch.float32) for size, wide in described]
    order = random.sample(range(len(tensors)), len(tensors))
    packets = plan_packets(tensors, order, limit=limit, alone=alone)
    sent = [index for packet in packets for index in packet]
    assert sorted(sent) == [index for index, tensor in enumerate(tensors) if tensor.nbytes]
    for packet in packets:
        assert len({tensors[index].dtype for index in packet}) == 1
        assert len(packet) == 1 or sum(tensors[index].nbytes for index in packet) <= limit
        assert len(packet) == 1 or all(tensors[index].nbytes < alone for index in packet)
        assert all(order.index(one) < order.index(other) for one, other in pairwise(packet))
