"""Sums over devices: the bits of the tree, in slices or not, and no more memory than is asked for."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.passes.summing import MIN_PARALLEL_ELEMENTS, TreeSum
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.tree import PartialSum, Tensors, total

LARGE = (MIN_PARALLEL_ELEMENTS, 3, 130, 0, 70)


def partials(shards: list[int], sizes: tuple[int, ...], absent: set[tuple[int, int]]) -> list[PartialSum]:
    generator = torch.Generator().manual_seed(0)
    return [
        PartialSum(
            shard,
            [
                None if (shard, index) in absent else torch.randn(size, generator=generator)
                for index, size in enumerate(sizes)
            ],
        )
        for shard in shards
    ]


def copied(sums: list[PartialSum]) -> list[PartialSum]:
    return [PartialSum(each.shard, [None if part is None else part.clone() for part in each.tensors]) for each in sums]


def same(left: Tensors, right: Tensors) -> bool:
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("sizes", [LARGE, (5, 3, 0, 7, 2)])
@pytest.mark.parametrize("shards", [[0], [0, 1], [0, 4, 6], [0, 1, 2, 3, 4], [2, 3, 5]])
def test_slices_do_not_show_in_the_bits(shards: list[int], sizes: tuple[int, ...], devices: int, keep: bool) -> None:
    absent = {(0, 1), (2, 1), (3, 1), (1, 2), *((shard, 4) for shard in shards)}
    given = partials(shards, sizes, absent)
    expected = total(copied(given))
    before = copied(given)
    with ReplicaSet(nn.Linear(1, 1), ["cpu"] * devices) as replicas:
        summed = TreeSum(replicas, sizes).total(given, keep=keep)
    assert same(summed, expected)
    if keep:
        assert all(same(now.tensors, then.tensors) for now, then in zip(given, before, strict=True))


def test_another_order_gives_other_bits() -> None:
    given = partials([0, 1, 2, 3], LARGE, set())
    expected = total(copied(given))
    folded = [part.clone() for part in given[0].tensors if part is not None]
    for each in given[1:]:
        for sums, part in zip(folded, each.tensors, strict=True):
            sums.add_(part)  # type: ignore[arg-type]  # none is absent
    assert not same(list(folded), expected)


def test_gradients_that_lie_apart_in_memory_are_summed_as_they_are() -> None:
    model = nn.Conv2d(64, 700, 3, bias=False).to(memory_format=torch.channels_last)
    assert model.weight.numel() > MIN_PARALLEL_ELEMENTS
    x = torch.randn(4, 64, 4, 4).to(memory_format=torch.channels_last)
    grads = []
    for devices in (1, 2):
        with ls.ReplicaGroup(model, ["cpu"] * devices, num_shards=4) as group:
            group.backward(torch.ones_like(group.forward(x)))
        grads.append(model.weight.grad.clone())
    assert torch.equal(*grads)


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(900, 900, bias=False), nn.ReLU(), nn.Linear(900, 3))


def test_parts_add_up_to_the_sum_on_any_devices() -> None:
    x, model = torch.randn(8, 900), large()
    sums = []
    for devices, num_shards in itertools.product((1, 2, 3), (None, 4)):
        with ls.ReplicaGroup(model, ["cpu"] * devices, num_shards=num_shards) as group:
            group.backward(torch.ones_like(group.forward(x)))
            for name, parts in group.gradients(merge=False).items():
                whole = torch.stack(parts).double().sum(0)
                torch.testing.assert_close(whole, group.gradients()[name].double(), rtol=1e-5, atol=1e-5)
        if num_shards:
            sums.append(ls.digest([parameter.grad for parameter in model.parameters()]))
    assert len(set(sums)) == 1


def live_bytes() -> int:
    """Count the memory of all tensors that Python can see, each storage once."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided
    }
    return sum(storages.values())


def test_no_more_gradients_are_held_than_can_be_asked_for() -> None:
    x, model = torch.randn(8, 900), large()
    size = sum(parameter.numel() * 4 for parameter in model.parameters())

    def held() -> float:
        return round((live_bytes() - before) / size, 1)

    for keep, after_backward in ((True, 5.0), (False, 1.0)):
        with ls.ReplicaGroup(model, ["cpu"] * 4, device_grads=keep) as group:
            group.forward(x)
            group.zero_grad()
            before = live_bytes()
            group.backward(torch.ones(8, 3))
            assert held() == after_backward  # the sum, and a part for each of four devices
            group.forward(x)
            assert held() == 1.0  # what the next backward replaces is gone
            group.backward(torch.ones(8, 3))
            model.zero_grad()
            group.forward(x)
            assert held() == 0.0


def test_parts_that_add_up_are_kept_until_they_are_cleared() -> None:
    model = nn.Linear(3, 2)
    with ls.ReplicaGroup(model, ["cpu"] * 2, grad_mode="add") as group:
        for _ in range(2):
            group.backward(torch.ones_like(group.forward(torch.ones(4, 3))))
        assert [part.tolist() for part in group.gradients(merge=False)["bias"]] == [[4.0, 4.0]] * 2
        group.forward(torch.ones(4, 3))
        assert [part.tolist() for part in group.gradients(merge=False)["bias"]] == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("grad_mode", ["write", "add"])
def test_parts_that_are_not_kept_cannot_be_asked_for(grad_mode: str) -> None:
    x = torch.randn(6, 3)
    found = []
    for keep in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        with ls.ReplicaGroup(model, ["cpu"] * 3, grad_mode=grad_mode, device_grads=keep) as group:
            for _ in range(2):
                group.backward(torch.ones_like(group.forward(x)))
            found.append(ls.digest(group.gradients()))
            if not keep:
                with pytest.raises(ls.OrderError, match="require device_grads=True"):
                    group.gradients(merge=False)
    assert found[0] == found[1]


def test_a_forward_without_graphs_leaves_the_parts() -> None:
    with ls.ReplicaGroup(nn.Linear(3, 2), ["cpu"] * 2) as group:
        group.backward(torch.ones_like(group.forward(torch.ones(4, 3))))
        with torch.no_grad():
            group.forward(torch.ones(4, 3), training=False)
        assert None not in group.gradients(merge=False)["bias"]
