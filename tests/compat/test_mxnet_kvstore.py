"""MXNet's key-value store: keys, sums, updates, compression, saved state; alone and on several processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.compat.mxnet import KVStore, kvstore
from lockstep.compat.mxnet.kvstore import TwoBitCompression
from tests.support.ranks import run_on_ranks


def pulled(store: KVStore, key: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    store.pull(key, out)
    return out


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return ls.MomentumSGD(parameters, lr=0.5, momentum=0.5)


def test_a_value_becomes_the_sum_and_the_last_push_wins() -> None:
    store = kvstore.create("device")
    assert (store.type, store.rank, store.num_workers) == ("device", 0, 1)
    ones = torch.ones(2, 3)
    store.init("w", ones)
    assert torch.equal(pulled(store, "w", ones), ones)
    store.push("w", [ones, ones, ones])
    store.push("w", [ones, 4 * ones])
    assert torch.equal(pulled(store, "w", ones), 5 * ones)
    assert ones.eq(1).all()  # what was given is left as it is


def test_several_keys_at_once_and_several_targets_for_each() -> None:
    store = KVStore()
    store.init([1, 2], [torch.zeros(2), torch.zeros(3)])
    store.push([1, 2], [[torch.ones(2), torch.ones(2)], [torch.ones(3)]], priority=-1)
    targets = [[torch.empty(2), torch.empty(2)], [torch.empty(3)]]
    store.pull([1, 2], targets)
    assert [[part.tolist() for part in parts] for parts in targets] == [[[2.0, 2.0]] * 2, [[1.0] * 3]]


def test_a_key_that_comes_twice_in_a_push_is_pushed_once() -> None:
    store = KVStore()
    store.init(["v", "w"], [torch.zeros(2)] * 2)
    store.push(["w", "v", "w"], [torch.ones(2), 5 * torch.ones(2), [torch.ones(2), 2 * torch.ones(2)]])
    out = [torch.empty(2) for _ in range(3)]
    store.pull(["w", "v", "w"], out)
    assert [each.tolist() for each in out] == [[4.0, 4.0], [5.0, 5.0], [4.0, 4.0]]


def test_push_and_pull_in_one_call_write_to_what_was_pushed() -> None:
    store = KVStore()
    replicas = [torch.ones(2), 2 * torch.ones(2)]
    store.broadcast("w", torch.zeros(2), replicas[:1])
    assert replicas[0].eq(0).all()
    store.pushpull("w", replicas)
    assert all(replica.eq(2).all() for replica in replicas)


def test_sums_are_made_in_the_trees_order() -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    store = KVStore()
    store.init("w", parts[0])
    store.push("w", parts)
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert torch.equal(pulled(store, "w", expected), expected)
    from_the_left = parts[0] + parts[1] + parts[2] + parts[3] + parts[4]
    assert not torch.equal(expected, from_the_left)


def test_each_key_has_an_optimizer_whether_made_before_it_or_after() -> None:
    store = KVStore()
    store.init("a", torch.ones(1))
    store.set_optimizer(sgd, rescale_grad=0.5)
    store.init("b", torch.ones(1))
    store.optimizers["b"].param_groups[0]["lr"] = 0.25
    for _ in range(2):
        store.push(["a", "b"], [[torch.ones(1), torch.ones(1)]] * 2)
    # g = 0.5·(1 + 1): 1 - 0.5 - (0.25 + 0.5), and 1 - 0.25 - (0.125 + 0.25).
    assert [pulled(store, key, torch.ones(1)).item() for key in "ab"] == [-0.25, 0.375]


def test_a_function_as_updater_gets_key_sum_and_value() -> None:
    store = KVStore()
    seen = []

    def add(key: Any, summed: torch.Tensor, value: torch.Tensor) -> None:
        seen.append(key)
        value += 2 * summed

    store.init(3, torch.ones(2))
    store.set_updater(add)
    store.push(3, [torch.ones(2)] * 4)
    assert pulled(store, 3, torch.ones(2)).tolist() == [9.0, 9.0]
    assert seen == [3]
    assert store.optimizers == {}


def test_what_compression_keeps_back_is_sent_later() -> None:
    store = KVStore("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("w", torch.zeros(3))
    gradients = [torch.tensor([0.3, 0.75, -0.5]), torch.tensor([0.2, 0.0, 0.0])]
    got = []
    for _ in range(3):
        store.push("w", gradients)
        got.append(pulled(store, "w", torch.zeros(3)).tolist())
    assert got == [[0.0, 0.5, -0.5], [0.5, 0.5, -0.5], [0.5, 0.5, -0.5]]


def test_a_saved_state_goes_on_to_the_same_bits() -> None:
    def make() -> KVStore:
        store = KVStore("device")
        store.set_gradient_compression({"type": "2bit", "threshold": 0.25})
        store.set_optimizer(sgd)
        store.init([1, 2], [torch.zeros(3), torch.zeros(2)])
        return store

    def work(store: KVStore, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            both = [[torch.randn(size, generator=generator) for _ in range(2)] for size in (3, 2)]
            store.push([1, 2], both)

    straight, resumed = make(), make()
    work(straight, range(3))
    saved = copy.deepcopy(straight.state_dict())
    work(straight, range(3, 6))
    resumed.load_state_dict(saved)
    work(resumed, range(3, 6))
    for key, size in ((1, 3), (2, 2)):
        ours, theirs = pulled(resumed, key, torch.ones(size)), pulled(straight, key, torch.ones(size))
        assert torch.equal(ours, theirs)
        assert ours.ne(0).any()


def test_a_state_that_does_not_fit_is_refused() -> None:
    store = KVStore("device")
    store.init("w", torch.zeros(1))
    state = store.state_dict()
    with pytest.raises(ls.StateError, match="KVStore must hold 'values', 'optimizers', 'residuals'; missing"):
        store.load_state_dict({})
    with pytest.raises(ls.StateError, match="KVStore's values must hold 'w'; unknown: 'v'"):
        store.load_state_dict({**state, "values": {**state["values"], "v": torch.zeros(1)}})
    with pytest.raises(ls.StateError, match="must have residuals where its saved state has"):
        store.load_state_dict({**state, "residuals": {}})
    store.set_optimizer(sgd)
    with pytest.raises(ls.StateError, match="must have optimizers where its saved state has"):
        store.load_state_dict(state)
    with pytest.raises(ls.StateError, match="KVStore's optimizers must hold 'w'; missing: 'w'"):
        store.load_state_dict({**state, "optimizers": {}})


def test_calls_that_do_not_fit_are_refused_and_change_nothing() -> None:
    store = KVStore()
    store.init("w", torch.zeros(2))
    for call in (store.push, store.pull):
        with pytest.raises(ls.OrderError, match=r"`init` must come before .* 'v' has no value"):
            call("v", torch.ones(2))
        with pytest.raises(ValueError, match=r"'w' must have the shape \(2,\), got \(3,\)"):
            call(["w", "w"], [torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match=r"`out` for 'w' must have the shape \(2,\), got \(3,\)"):
        store.pull("w", torch.ones(3))
    with pytest.raises(ValueError, match="`value` must hold a tensor for each key, and 'w' has none"):
        store.push("w", [])
    with pytest.raises(ls.OrderError, match="`init` must be called once per key, got 'w' again"):
        store.init(["v", "w"], [torch.ones(2)] * 2)
    with pytest.raises(TypeError, match="all integers or all strings, got 3"):
        store.init(3, torch.ones(2))
    with pytest.raises(ls.OrderError, match="`init` must be called once per key, got 'v' again"):
        store.init(["v", "v"], [torch.ones(2)] * 2)
    with pytest.raises(TypeError, match="all integers or all strings, got 3"):
        store.init(["v", 3], [torch.ones(2)] * 2)
    with pytest.raises(ValueError, match=r"as many keys as there are values \(1\), got 2"):
        store.init(["a", "b"], [torch.ones(2)])
    with pytest.raises(ValueError, match="'a' has none"):
        store.init("a", [])
    assert list(store.state_dict()["values"]) == ["w"]
    assert pulled(store, "w", torch.ones(2)).eq(0).all()


def test_stores_and_compressions_that_there_are_not_are_refused() -> None:
    for name in ("foo", "dist_async"):
        with pytest.raises(ValueError, match=f"`name` must be 'local', .* or 'dist_sync_device', got '{name}'"):
            KVStore(name)
    with pytest.raises(ValueError, match="of type '2bit' for a store that is not 'local'"):
        KVStore("local").set_gradient_compression({"type": "2bit"})
    with pytest.raises(ValueError, match="of type '2bit'"):
        KVStore("device").set_gradient_compression({"type": "3bit"})
    with pytest.raises(ValueError, match=r"with a 'threshold' at most, got .*'bits': 2"):
        KVStore("device").set_gradient_compression({"type": "2bit", "bits": 2})
    with pytest.raises(ValueError, match="`threshold` must be finite and above 0, got 0"):
        TwoBitCompression(0)


def on_a_rank(communicator: ls.Communicator) -> None:
    """Push from two devices on each of three ranks; every rank moves its own copy alike."""
    rank = communicator.rank
    store = KVStore("dist_sync", communicator=communicator)
    assert (store.rank, store.num_workers) == (rank, 3)
    store.init("w", torch.full((2,), float(rank + 7)))
    assert pulled(store, "w", torch.ones(2)).tolist() == [7.0, 7.0]  # rank 0's
    store.set_optimizer(sgd)
    store.push("w", [torch.full((2,), float(rank)), torch.ones(2)])
    assert pulled(store, "w", torch.ones(2)).tolist() == [4.0, 4.0]  # 7 - 0.5·(0 + 1 + 2 + 3)
    compressed = KVStore("dist_sync", communicator=communicator)
    compressed.set_gradient_compression({"type": "2bit", "threshold": 2.0})
    compressed.init("w", torch.zeros(1))
    compressed.push("w", [torch.full((1,), float(rank)), torch.ones(1)])
    assert pulled(compressed, "w", torch.ones(1)).item() == 4.0  # a rank's sums: 1, 2, 3


def test_processes_push_to_one_store() -> None:
    run_on_ranks(on_a_rank, 3)


def _push_in_another_order(communicator: ls.Communicator) -> str:
    """Push two keys, on one rank the second one first."""
    store = KVStore("dist_sync", communicator=communicator)
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ls.DisagreementError, match="same keys in the same order, got") as caught:
        store.push(["a", "b"][communicator.rank], torch.ones(2))
    return str(caught.value)


def test_processes_must_push_the_same_keys() -> None:
    first, second = run_on_ranks(_push_in_another_order, 2)
    assert "got ['a'] on rank 0 and ['b'] on rank 1" in first
    assert "got ['b'] on rank 1 and ['a'] on rank 0" in second


ONE_ROW, TWO_ROWS = torch.tensor([[0.0], [1.0], [0.0]]), torch.tensor([[0.25], [0.0], [2.0]])
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": Tensor.clone,
    "rows": lambda dense: dense.to_sparse(1),
    "elements": lambda dense: dense.to_sparse(),
}


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids=" and ".join)
@pytest.mark.parametrize("how", ["assigned", "function", "SGD", "MomentumSGD", "compressed"])
def test_sparse_gradients_are_summed_like_dense_ones(layouts: tuple[str, str], how: str) -> None:
    def values(first: str, second: str) -> list[Tensor]:
        store, found = KVStore("device"), []
        store.init("w", torch.ones(3, 1))
        if how == "compressed":
            store.set_gradient_compression({"type": "2bit"})
        elif how == "function":
            store.set_updater(lambda _, summed, value: value.sub_(summed.to_dense()))
        elif how != "assigned":
            optimizer = torch.optim.SGD if how == "SGD" else ls.MomentumSGD
            store.set_optimizer(lambda parameters: optimizer(parameters, lr=0.5, momentum=0.5), rescale_grad=0.25)
        for _ in range(3):
            store.push("w", [LAYOUTS[first](ONE_ROW), LAYOUTS[second](TWO_ROWS)])
            found.append(pulled(store, "w", ONE_ROW))
        return found

    assert all(map(torch.equal, values(*layouts), values("dense", "dense")))


def test_an_embedding_is_pushed_and_sparse_values_are_set_but_not_pulled() -> None:
    store = KVStore("device")
    embedding = nn.Embedding(3, 2, sparse=True)
    store.init("w", embedding.weight)
    store.set_optimizer(torch.optim.SparseAdam)
    embedding(torch.tensor([1, 1])).sum().backward()
    assert embedding.weight.grad is not None
    with pytest.raises(ValueError, match="`out` for 'w' must be dense"):
        store.pushpull("w", embedding.weight.grad)
    store.pull("w", out := torch.empty(3, 2))
    assert torch.equal(out, embedding.weight)
    store.pushpull("w", embedding.weight.grad, out)
    assert (out != embedding.weight).any(1).tolist() == [False, True, False]
    store.init("v", ONE_ROW.to_sparse())
    store.pull("v", out := torch.empty(3, 1))
    assert torch.equal(out, ONE_ROW)
