"""Replicas with memory of their own, as on other devices, compute with the model's weights of the moment.

On CPUs all replicas share the model's memory, so the only question that tells one case from the other,
`ReplicaSet._shares_memory`, is answered with "no" here: for all replicas but the first, or for all.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from ctypes import c_double
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lockstep as ls
from lockstep.replicas.pool.replica_set import ReplicaSet
from tests.support.runs import Placement, finalized, train, updater_for
from tests.support.workloads import CONVNET

TWO = ["cpu", "cpu"]
OWNERS: dict[str, Callable[[ReplicaSet, int, torch.Tensor], bool]] = {
    "others": lambda _, place, __: place == 0,
    "all": lambda *_: False,
}


@pytest.fixture(params=OWNERS)
def own_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give the replicas that are made after a call memory of their own."""
    answer = OWNERS[request.param]
    return lambda: monkeypatch.setattr(ReplicaSet, "_shares_memory", answer)


class Net(nn.Module):
    """Also reads a buffer, and has a weight that is used by reference in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) + self.shift


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))


# Ways of changing weights -------------------------------------------------------------------------


@torch.no_grad()
def give_gradients(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + 0.1 * number)


def step(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        give_gradients(model)
        make(model.parameters()).step()
        model.zero_grad()

    return change


def for_each(write: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            write(parameter)

    return change


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.5


def swap_data(parameter: nn.Parameter) -> None:
    """Leave other values at the old address, where the allocator gives the freed memory out again."""
    kept = parameter.data.clone() * 0.5
    parameter.data = torch.empty(0)
    parameter.data = kept.clone()


def write_by_numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy()[...] *= 0.75


def counted(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.25)


@torch.library.custom_op("lockstep_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """Write to the argument without saying so, as operators of extensions do."""
    x.numpy()[...] *= 0.5
    return x.new_zeros(())


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "AdamW(fused)": step(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)),
    "SGD(fused)": step(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)),
    "Adagrad(fused)": step(lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True)),
    "CorrectedMomentumSGD(fused)": step(lambda params: ls.CorrectedMomentumSGD(params, lr=0.1, fused=True)),
    "SGD(foreach)": step(lambda params: torch.optim.SGD(params, lr=0.1, foreach=True)),
    "data.add_": for_each(lambda parameter: parameter.data.add_(0.25)),
    "data.copy_": for_each(lambda parameter: parameter.data.copy_(torch.full_like(parameter, 0.3))),
    "data =": for_each(set_data),
    "data = twice": for_each(swap_data),
    "numpy": for_each(write_by_numpy),
    "custom operator": for_each(lambda parameter: halve(parameter.detach())),
    "counted": for_each(counted),
    "buffers": lambda model: [buffer.data.add_(1) for buffer in model.buffers()] and None,
    "buffer by numpy": lambda model: model.get_buffer("shift").numpy().fill(2.0),
}
UNCOUNTED = [name for name in CHANGES if name not in ("SGD(foreach)", "counted", "data =", "data = twice")]


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def through_group(change: Callable[[nn.Module], None]) -> str:
    model = Net()
    found: list[Any] = []
    with ls.ReplicaGroup(model, TWO, num_shards=3) as group:
        for seed in range(3):
            out = group.forward(batch(seed))
            group.backward(torch.ones_like(out))
            found.append((out.clone(), [None if each is None else each.clone() for each in grads(model)]))
            change(model)
        found.append(group.forward(batch(9), training=False))
        change(model)
        with torch.no_grad():
            found.append(group.forward(batch(9), training=False))
    return ls.digest(found, model)


def through_data_parallel(change: Callable[[nn.Module], None], **options: Any) -> str:
    torch.manual_seed(1)
    module = Net()
    net = ls.DataParallel(module, TWO, num_shards=3, **options)
    found: list[Any] = []
    for seed in range(3):
        out = net(batch(seed))
        out.square().mean().backward()
        found.append((out.detach(), [None if each is None else each.clone() for each in grads(module)]))
        change(module)
    with torch.no_grad():
        found.append(net.eval()(batch(9)))
        change(module)
        found.append(net(batch(9)))
    net.release()
    return ls.digest(found, module)


def through_updater(change: Callable[[nn.Module], None]) -> str:
    model = Net()
    updater = ls.ParallelUpdater(
        ls.BatchIterator(list(zip(batch().unbind(), torch.ones(7, 3), strict=True)), 7),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=TWO,
        num_shards=3,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    losses = []
    with finalized(updater):
        for _ in range(3):
            losses.append(float(updater.update().loss))
            change(model)
    return ls.digest(losses, model)


THROUGH: dict[str, Callable[[Callable[[nn.Module], None]], str]] = {
    "ReplicaGroup": through_group,
    "DataParallel": through_data_parallel,
    "DataParallel in one graph": lambda change: through_data_parallel(change, parallel_backward=False),
    "DataParallel with flat parameters": lambda change: through_data_parallel(change, flatten_parameters=True),
    "ParallelUpdater": through_updater,
}


@cache
def where_memory_is_shared(through: str, name: str) -> str:
    return THROUGH[through](CHANGES[name])


@pytest.mark.each_value
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("through", THROUGH)
def test_weights_arrive_however_they_are_written(through: str, name: str, own_memory: Callable[[], None]) -> None:
    shared = where_memory_is_shared(through, name)
    own_memory()
    assert THROUGH[through](CHANGES[name]) == shared


@pytest.mark.parametrize("name", CHANGES)
def test_every_way_of_writing_changes_what_is_computed(name: str) -> None:
    model = Net().eval()
    before = model(batch())
    CHANGES[name](model)
    assert not torch.equal(model(batch()), before)


def test_the_double_shares_no_memory(own_memory: Callable[[], None]) -> None:
    own_memory()
    model = nn.Linear(2, 1)
    with ReplicaSet(model, TWO) as replicas:
        copied = replicas.replicas[1]
        model.weight.data.fill_(3.0)
        assert not torch.equal(copied.weight, model.weight)
        replicas.refresh()
        assert torch.equal(copied.weight, model.weight)
        assert copied.weight.data_ptr() != model.weight.data_ptr()


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["fused", "adamw", "corrected"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_an_updater_that_steps_trains_the_same_weights(
    optimizer: str, precision: str, own_memory: Callable[[], None]
) -> None:
    def run(placement: Placement) -> str:
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        options: dict[str, Any] = {"optimizer": optimizer, "num_shards": 5, "precision": precision}
        data_type = {"loss_fn": lambda model, x, y: nn.functional.cross_entropy(model(x.to(dtype)), y)}
        return train(CONVNET, placement, model=CONVNET.model().to(dtype), updates=4, **options, **data_type)

    wanted = run(Placement(1))
    own_memory()
    assert run(Placement(3)) == wanted


# Between a forward and its backward ----------------------------------------------------------------


@pytest.fixture(params=["ReplicaGroup", "DataParallel"])
def passes(request: pytest.FixtureRequest) -> Iterator[Callable[[nn.Module], Any]]:
    """Give what runs a model's forward and returns a backward to be called later."""
    made: list[Any] = []

    def pair(model: nn.Module) -> Callable[[torch.Tensor], Callable[[], None]]:
        if request.param == "ReplicaGroup":
            made.append(group := ls.ReplicaGroup(model, TWO, num_shards=3))

            def by_group(x: torch.Tensor) -> Callable[[], None]:
                out = group.forward(x)
                return lambda: group.backward(torch.ones_like(out))

            return by_group
        made.append(net := ls.DataParallel(model, TWO, num_shards=3))

        def by_net(x: torch.Tensor) -> Callable[[], None]:
            out = net(x)
            return lambda: out.sum().backward()

        return by_net

    yield pair
    for each in made:
        each.release()


@pytest.mark.each_value
@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_backward_reads_what_was_written_after_its_forward(
    passes: Callable[[nn.Module], Any], name: str, own_memory: Callable[[], None]
) -> None:
    """As it does where memory is shared, and in a loop of one's own."""

    def run() -> str:
        model = Net()
        backward = passes(model)(batch())
        CHANGES[name](model)
        backward()
        return ls.digest(grads(model))

    shared = run()
    own_memory()
    assert run() == shared


def test_a_write_that_autograd_counts_is_refused_in_backward(
    passes: Callable[[nn.Module], Any], own_memory: Callable[[], None]
) -> None:
    for setting in (lambda: None, own_memory):
        setting()
        model = Net()
        backward = passes(model)(batch())
        CHANGES["counted"](model)
        with pytest.raises(ls.ReplicaError, match="modified by an inplace operation"):
            backward()


def test_data_set_after_a_forward_leaves_its_graph_with_the_old(
    passes: Callable[[nn.Module], Any], own_memory: Callable[[], None]
) -> None:
    untouched = Net()
    passes(untouched)(batch())()
    own_memory()
    model = Net()
    backward = passes(model)(batch())
    for_each(set_data)(model)
    backward()
    assert ls.digest(grads(model)) == ls.digest(grads(untouched))


def test_a_second_forward_leaves_the_graph_of_the_first_alone(own_memory: Callable[[], None]) -> None:
    def run() -> str:
        torch.manual_seed(1)
        net = ls.DataParallel(model := Net(), TWO, num_shards=3)
        (net(batch(1)).sum() + net(batch(2)).square().sum()).backward()
        with torch.no_grad():
            net(batch(3))
        net.release()
        return ls.digest(grads(model), model)

    shared = run()
    own_memory()
    assert run() == shared


def test_a_graph_that_is_kept_follows_a_fused_step(own_memory: Callable[[], None]) -> None:
    def run() -> str:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        with ls.ReplicaGroup(model, TWO, num_shards=3) as group:
            out = group.forward(batch())
            group.backward(torch.ones_like(out), retain_graph=True)
            optimizer.step()
            group.backward(torch.ones_like(out))
        return ls.digest(grads(model))

    shared = run()
    own_memory()
    assert run() == shared


def test_replicas_made_in_inference_mode_can_be_trained(own_memory: Callable[[], None]) -> None:
    def run() -> str:
        model = Net()
        with ls.ReplicaGroup(model, TWO, num_shards=3) as group:
            with torch.inference_mode():
                group.forward(batch(), training=False)
            out = group.forward(batch())
            group.backward(torch.ones_like(out))
        return ls.digest(grads(model), model)

    shared = run()
    own_memory()
    assert run() == shared


def test_memory_of_another_format_at_the_same_address_is_noticed(own_memory: Callable[[], None]) -> None:
    own_memory()
    model = nn.Linear(2, 2, bias=False)
    whole = model.weight.data
    with ls.ReplicaGroup(model, TWO) as group:
        group.forward(torch.ones(2, 2))
        model.weight.data = whole.t()  # the same address, other strides
        assert torch.equal(group.forward(torch.eye(2)), model(torch.eye(2)))
        assert group.replicas[1].weight.stride() == (1, 2)
        model.weight.data = whole[:1]
        assert torch.equal(group.forward(torch.eye(2)), model(torch.eye(2)))


def test_an_update_after_an_error_and_a_step_of_the_user_s_own(own_memory: Callable[[], None]) -> None:
    def run() -> str:
        updater = updater_for(CONVNET, Placement(2), optimizer="fused", num_shards=5)
        model = updater.get_all_models()["main"]
        updater.update()
        give_gradients(model)
        updater.get_optimizer("main").step()
        updater.update()
        digest = ls.digest(model)
        updater.finalize()
        return digest

    shared = run()
    own_memory()
    assert run() == shared


def test_replicas_follow_in_place_changes_of_arrays() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.masks = nn.Linear(3, 2), {"outputs": np.ones(2, dtype=np.float32)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * torch.from_numpy(self.masks["outputs"])
            return out

    model, x = Masked(), torch.randn(4, 3)
    with ls.ReplicaGroup(model, devices=["cpu", "cpu"]) as group:
        replicas = [*group.replicas]
        assert torch.equal(group.forward(x), model(x))
        assert all(map(operator.is_, group.replicas, replicas))
        model.masks["outputs"][0] = 0.0
        assert torch.equal(group.forward(x), model(x))


class Schedule:
    """A callable object, whose value changes between updates."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self) -> float:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class CopiesItself(Schedule):
    def __deepcopy__(self, memo: Any) -> CopiesItself:
        copied = CopiesItself()
        copied.value = self.value
        return copied


class Perceptual:
    """A callable object that holds a network."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1).requires_grad_(False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def one_more(held: Any) -> None:
    held.value += 1


def moved(net: nn.Linear) -> None:
    net.weight.data.add_(1)


def next_key(held: dict[float, int]) -> float:
    return next(iter(held))


def double(tensor: torch.Tensor) -> float:
    return 2 * float(tensor)


ONE = torch.ones(1)
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "callable": (Schedule, lambda held: held(), one_more),
    "slots": (Slotted, lambda held: held.value, one_more),
    "own copy": (CopiesItself, lambda held: held(), one_more),
    "bound": (lambda: Schedule().__call__, lambda held: held(), lambda held: one_more(held.__self__)),
    "partial": (lambda: partial(double, torch.ones(())), lambda held: held(), lambda held: held.args[0].add_(1)),
    "keywords": (
        lambda: partial(dict, value=1.0),
        lambda held: held()["value"],
        lambda held: held.keywords.update(value=2),
    ),
    "array": (lambda: array("d", [1.0]), lambda held: held[0], lambda held: held.append(held.pop() + 1)),
    "bytes": (lambda: bytearray([1]), lambda held: held[0], lambda held: held.append(held.pop() + 1)),
    "ctypes": (lambda: c_double(1.0), lambda held: held.value, lambda held: setattr(held, "value", held.value + 1)),
    "order": (lambda: {1.0: 0, 2.0: 0}, next_key, lambda held: held.update({next_key(held): held.pop(next_key(held))})),
    "deque": (lambda: deque([1.0], maxlen=2), lambda held: held[-1], lambda held: held.append(held[-1] + 1)),
    "tensor": (lambda: torch.ones(()), lambda held: held, lambda held: held.data.add_(1)),
    "network": (Perceptual, lambda held: held(ONE), lambda held: moved(held.net)),
    "method": (
        lambda: nn.Linear(1, 1).requires_grad_(False).forward,
        lambda held: held(ONE),
        lambda held: moved(held.__self__),
    ),
    "wrapped": (
        lambda: partial(nn.Linear(1, 1).requires_grad_(False)),
        lambda held: held(ONE),
        lambda held: moved(held.func),
    ),
}
"""What a model may hold: how it is made, read and changed."""


@pytest.mark.parametrize("kind", HELD)
def test_replicas_follow_changes_of_what_the_model_holds(kind: str) -> None:
    make, read, change = HELD[kind]

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = nn.Linear(3, 2), make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * read(self.held)
            return out

    model, x = Holding(), torch.randn(4, 3)
    with ls.ReplicaGroup(model, devices=["cpu", "cpu"]) as group:
        replicas = [*group.replicas]
        first = group.forward(x)
        assert torch.equal(first, model(x))
        assert all(map(operator.is_, group.replicas, replicas))
        change(model.held)
        assert torch.equal(group.forward(x), model(x))
        assert not torch.equal(group.forward(x), first)


@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
def test_a_model_with_spectral_norm_that_has_run_is_copied() -> None:
    model = nn.utils.spectral_norm(nn.Linear(3, 2))
    model(torch.randn(4, 3))
    with ls.ReplicaGroup(model, devices=["cpu", "cpu"]) as group:
        assert group.forward(torch.randn(4, 3)).shape == (4, 2)


def test_pruning_again_selects_by_the_weights_that_were_trained() -> None:
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3

    def pruned(*, plain: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        updater = ls.ParallelUpdater(
            lambda: iter([(x, y)]), optimizer, model, num_shards=1, loss_fn=ls.supervised(nn.functional.cross_entropy)
        )
        for _ in range(3):
            prune.l1_unstructured(model, "weight", amount=3)
            for _ in range(5):
                if plain:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                else:
                    updater.update()
        updater.finalize()
        return model

    ours, theirs = pruned(plain=False), pruned(plain=True)
    assert torch.equal(ours.weight_mask, theirs.weight_mask)
    assert torch.allclose(ours.weight, theirs.weight)
