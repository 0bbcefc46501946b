"""Whatever a module takes, gives, and does on the way, on several devices it is what it is on one."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import lockstep as ls
from lockstep import nest
from lockstep.replicas.pool.copies import copy_model

X = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Named = namedtuple("Named", "a b")


@dataclass(frozen=True)
class Record:
    a: torch.Tensor
    scale: float = 2.0
    more: list[torch.Tensor] = field(default_factory=list)


class Model(nn.Module):
    """Calls a function of its layers and of the inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).double()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layers, *inputs)


def linear(function: Callable[..., Any]) -> nn.Module:
    return Model(lambda layers, *inputs: function(layers[0], *inputs), nn.Linear(4, 4))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    model[0].register_forward_hook(lambda _, inputs, output: output * inputs[0].mean(1, keepdim=True))
    model[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    model[1].register_full_backward_hook(lambda _module, before, _after: tuple(2 * each for each in before))
    model[0].weight.register_hook(lambda grad: 3 * grad)
    return model


def wrapped() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    return nn.Sequential(nn.Linear(4, 4).double(), ls.DataParallel(inner, ["cpu"] * 2))


def computed() -> nn.Module:
    parts = parametrizations.spectral_norm(nn.Linear(4, 3)), parametrizations.weight_norm(nn.Linear(3, 2))
    return nn.Sequential(*parts).double().eval()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "dataclass": (lambda: linear(lambda f, r: Record(f(r.a) * r.scale, 3.0, [r.a])), (Record(X),)),
    "dataclass beside a tensor": (lambda: linear(lambda f, x, r: f(x) + r.more[0]), (X, Record(X, 1.0, [X]))),
    "dataclass in a dict": (lambda: linear(lambda f, d: {"out": f(d["r"].a)}), ({"r": Record(X)},)),
    "named tuple": (lambda: linear(lambda f, n: Named(f(n.a), n.b * 2)), (Named(X, X),)),
    "ordered dict": (
        lambda: linear(lambda f, x: OrderedDict(b=f(x), a=[2 * f(x), {"z": x.sum(1)}])),
        (X,),
    ),
    "plain values": (lambda: linear(lambda f, x: (f(x), None, "s", 3, {"k": True})), (X,)),
    "one output twice": (lambda: linear(lambda f, x: [f(x)] * 2), (X,)),
    "input handed through": (lambda: linear(lambda f, x: (x, f(x))), (X,)),
    "no dimension": (lambda: linear(lambda f, x: f(x).mean()), (X,)),
    "penalty": (lambda: linear(lambda f, x: (f(x), f.weight.square().sum())), (X,)),
    "input changed in place": (lambda: linear(lambda f, x: f(x.clone().mul_(2))), (X,)),
    "one tensor given twice": (lambda: linear(lambda f, x, y: f(x * y)), (X, X)),
    "masks and bytes": (
        lambda: linear(lambda f, x, mask: f(x.double() / 255) * mask[:, None]),
        ((X * 50).to(torch.uint8), X[:, 0] > 0),
    ),
    "not contiguous": (lambda: nn.Linear(4, 3).double(), (X.t().contiguous().t(),)),
    "every other": (lambda: nn.Linear(2, 3).double(), (X[::2, ::2],)),
    "expanded": (lambda: nn.Linear(4, 3).double(), (X[:1].expand(7, 4),)),
    "channels last": (
        lambda: nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last),
        (torch.randn(7, 3, 5, 5).double().to(memory_format=torch.channels_last),),
    ),
    "sparse gradients": (
        lambda: nn.Embedding(10, 3, sparse=True).double(),
        (torch.tensor([1, 2, 3, 1, 5, 9, 9]),),
    ),
    "complex": (lambda: linear(lambda f, x: torch.complex(f(x), x) * torch.complex(x, f(x))), (X,)),
    "tied weights": (tied, (X,)),
    "hooks": (hooked, (X,)),
    "one inside another": (wrapped, (X,)),
    "computed weights": (computed, (X,)),
}


def square(output: Any) -> torch.Tensor:
    numbers = [each for each in nest.tensors(output) if each.is_floating_point() or each.is_complex()]
    return torch.stack([each.abs().square().sum() for each in numbers]).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    return {name: grad.to_dense().clone() for name, grad in named}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("name", CASES)
def test_several_devices_give_what_one_gives(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = make()
    net = ls.DataParallel(model, ["cpu"] * 3)
    output = net(*inputs)
    square(output).backward()
    found = gradients(model)
    model.zero_grad()
    expected = model(*inputs)
    square(expected).backward()
    # Sums over samples are made in another order, so the last bits differ.
    torch.testing.assert_close(found, gradients(model), rtol=1e-10, atol=1e-10)
    assert type(output) is type(expected)
    for ours, theirs in zip(nest.tensors(output), nest.tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_group_knows_fields_by_their_names() -> None:
    model = linear(lambda f, r: Record(f(r.a), r.scale, [f(r.more[0].t()).t()]))
    record = Record(X, 1.0, [X.t().contiguous()])
    dims = {"args[0].more": 1}
    with ls.ReplicaGroup(model, ["cpu"] * 2, batch_dim=dims, output_dim={"more": 1}, input_grads=True) as group:
        out = group.forward(record)
        assert [name for name, _ in group.output_shapes()] == ["a", "more[0]"]
        group.backward(Record(torch.ones(7, 4), 1.0, [None]))
        torch.testing.assert_close(out.more[0], out.a.t())
        assert [None if grad is None else grad.shape for grad in group.input_grads()] == [X.shape, None]


def test_a_packed_sequence_is_refused() -> None:
    packed = pack_padded_sequence(torch.randn(5, 7, 4), [5, 5, 4, 4, 3, 2, 1])
    with pytest.raises(ValueError, match=r"must hold as many samples as `input\[0\]` \(24\)"):
        ls.DataParallel(nn.LSTM(4, 3), ["cpu"] * 2)(packed)


def test_a_copy_made_between_forward_and_backward_is_a_module_of_its_own() -> None:
    net = ls.DataParallel(nn.Linear(4, 3).double(), ["cpu"] * 2)
    output = net(X)
    other = copy.deepcopy(net)
    output.sum().backward()
    assert other.module.weight.grad is None
    other(X).sum().backward()
    assert torch.equal(other.module.weight.grad, net.module.weight.grad)


def test_parameters_frozen_and_thawed_between_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    net = ls.DataParallel(model, ["cpu"] * 2)
    for frozen in (True, False, True):
        model.zero_grad()
        model[0].weight.requires_grad_(not frozen)
        net(X).sum().backward()
        assert (model[0].weight.grad is None) == frozen
        assert model[1].weight.grad is not None


def test_two_threads_of_the_users_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    net = ls.DataParallel(model, ["cpu"] * 2)
    expected = net(X)
    outputs: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            outputs.append(net(X))
            outputs[-1].sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 40
    assert all(torch.equal(each, expected) for each in outputs)


class Calling(nn.Module):
    """Keeps a function in an object of its own that calls the module it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).double()
        self.head = nn.Linear(4, 1).double()
        self.other = SimpleNamespace(read=lambda x: self.head(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other.read(self.body(x))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_computes_with_its_own_parameters_is_refused(devices: int) -> None:
    """A group lost the gradients of those, and in a `DataParallel` threads added them up as they came."""
    model = Calling()
    refusal = r"`model` must compute .* uses 'head.weight' of your original model"
    with ls.ReplicaGroup(model, ["cpu"] * devices, num_shards=3) as group:
        for _ in range(2):
            with pytest.raises(ValueError, match=refusal):
                group.forward(X)
        with torch.no_grad():
            torch.testing.assert_close(group.forward(X), model(X))
    with pytest.raises(ValueError, match=refusal):
        ls.DataParallel(model, ["cpu"] * devices, num_shards=3)(X)
    attached = ls.DataParallel(model, ["cpu"] * devices, num_shards=3, parallel_backward=False)
    attached(X).sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(X).sum().backward()
    torch.testing.assert_close(found, gradients(model))


# What refers to the original ---------------------------------------------------------------------------


class Gated(nn.Module):
    """A layer that multiplies by what its parent has set."""

    def __init__(self, parent: nn.Module, kind: str) -> None:
        super().__init__()
        find = weakref.ref(parent)
        self.body = nn.Linear(4, 4)
        # Not by `setattr`, which takes a proxy of a module for a module.
        self.__dict__["parent"] = weakref.proxy(parent) if kind == "proxy" else find
        self.parents = [lambda: parent] if kind == "function in a list" else [find]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent = self.parent if type(self.parent) in weakref.ProxyTypes else self.parents[0]()
        return self.body(x) * parent.gate  # type: ignore[union-attr, no-any-return]


class Recorder:
    """Notes something of the input in forward."""

    noted: Any = 1.0

    def note(self, _: nn.Module, given: tuple[torch.Tensor]) -> None:
        self.noted = _gate_of(given[0])


class Gating(nn.Module):
    """Sets an attribute in forward, which something else reads: a layer, a hook, or a function in an attribute."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.gate: Any = 1.0
        self.kind, self.head = kind, nn.Linear(4, 2)
        self.layer = Gated(self, kind) if kind in {"weak reference", "proxy", "function in a list"} else nn.Linear(4, 4)

        def multiply(x: torch.Tensor, *, by: Callable[[], Any] = lambda: self.gate) -> torch.Tensor:
            return x * by()

        def later(x: torch.Tensor) -> torch.Tensor:
            return inner(x)

        if kind == "forward in place of another":
            before = self.layer.forward
            self.layer.forward = lambda x: before(x) * self.gate  # type: ignore[method-assign]
        inner, default = partial(multiply), lambda x, of=self: x * of.gate
        acts = {"function": multiply, "function of a function": later, "default": default}
        self.act = acts.get(kind, torch.tanh)
        if kind == "hook":
            self.layer.register_forward_hook(lambda *called: called[2] * self.gate)
        if kind == "hook that sets":
            self.layer.register_forward_pre_hook(lambda _, given: setattr(self, "gate", _gate_of(given[0])))
            self.layer.register_forward_hook(partial(lambda *called: called[2] * self.gate))
        if kind == "hook of a recorder":
            self.recorder = Recorder()
            self.register_forward_pre_hook(self.recorder.note)
            self.layer.register_forward_hook(lambda *called: called[2] * self.recorder.noted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind != "hook that sets":
            self.gate = _gate_of(x)
        return self.head(self.act(self.layer(x)))


def _gate_of(x: torch.Tensor) -> torch.Tensor:
    return x.abs().mean(1, keepdim=True)


def gating(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Gating(kind)

    def loss_fn(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(net(x), y) * net.gate.mean()

    def reading_outside(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(net(x), y) * torch.as_tensor(model.gate).mean()

    return model, reading_outside if kind == "loss function" else loss_fn


def gated(model: nn.Module, loss_fn: Any, devices: int) -> list[torch.Tensor]:
    x, y = torch.ones(8, 4) * torch.arange(8)[:, None], torch.ones(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    updater = ls.ParallelUpdater([(x, y)] * 3, optimizer, model, devices=devices, num_shards=1, loss_fn=loss_fn)
    try:
        for _ in range(3):
            updater.update()
    finally:
        updater.finalize()
    return [each.detach() for each in model.parameters()]


REFERRING = (
    *("weak reference", "proxy", "function in a list", "function", "function of a function", "default"),
    *("hook", "hook that sets", "hook of a recorder", "forward in place of another"),
)


# This test reads the attribute itself.
@pytest.mark.filterwarnings("ignore:Forward changes attributes:lockstep.DeterminismWarning")
@pytest.mark.parametrize("kind", REFERRING)
def test_what_refers_to_the_model_refers_to_the_replica_there(kind: str) -> None:
    model, loss_fn = gating(kind)
    found = gated(model, loss_fn, 2)
    plain, loss_fn = gating(kind)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.001)
    x, y = torch.ones(8, 4) * torch.arange(8)[:, None], torch.ones(8, 2)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(plain, x, y).backward()
        optimizer.step()
    for one, other in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())
    # The original is never run.
    assert model.gate == 1.0


def test_functions_of_a_replica_share_what_they_share_in_the_model() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            last: Any = self

            def swap(value: Any) -> Any:
                nonlocal last
                last, before = value, last
                return before

            self.swap, self.read = swap, lambda: last

    model = Counted()
    copied = copy_model(model, torch.device("cpu"), lambda _: True, {})
    assert copied.swap(1) is copied
    assert copied.read() == 1
    assert model.read() is model


def test_copies_of_a_model_that_draws_to_copy_itself_leave_the_generators_alone() -> None:
    class Anew(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Anew:
            made = Anew(4, 3)
            made._parameters = copy.deepcopy(self._parameters, memo)
            return made

    before = torch.get_rng_state()
    model = Anew(4, 3)
    torch.set_rng_state(before)
    copied = copy_model(model, torch.device("cpu"), lambda _: True, {})
    assert torch.equal(copied.weight, model.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_forward_sets_is_not_read_from_the_original() -> None:
    model, loss_fn = gating("loss function")
    with pytest.raises(ValueError, match=r"A function must read 'gate', which a forward sets, from the replica"):
        gated(model, loss_fn, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_of_torch_export_is_trained() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    batch = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    exported = torch.export.export(net, (torch.ones(8, 4),), dynamic_shapes=batch).module()
    found = gated(exported, ls.supervised(nn.functional.mse_loss), 1)
    for one, other in zip(found, gated(net, ls.supervised(nn.functional.mse_loss), 1), strict=True):
        torch.testing.assert_close(one, other)


# What updates and saved states cannot write to -------------------------------------------------------------


def test_sparse_buffers_are_refused() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"must have dense buffers, got 'table' of the layout torch.sparse_coo"):
        gated(model, ls.supervised(nn.functional.mse_loss), 1)


def test_a_state_is_loaded_into_an_expanded_buffer() -> None:
    updaters = []
    for value in (2.0, 3.0):
        model = nn.Linear(4, 2)
        model.register_buffer("table", torch.tensor([value]).expand(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updaters.append(ls.ParallelUpdater([(X.float(), X.float()[:, :2])], optimizer, model, num_shards=2))
    updaters[1].load_state_dict(updaters[0].state_dict())
    assert model.get_buffer("table").tolist() == [2.0] * 3


def test_hooks_of_several_gradients_are_refused() -> None:
    model = nn.Linear(4, 2)
    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda _: None)
    with pytest.raises(ValueError, match=r"must have no hooks of several gradients .*, got one on 'weight'"):
        gated(model, ls.supervised(nn.functional.mse_loss), 1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()}).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_replicas_follow_the_order_of_modules() -> None:
    model = Chain()
    net = ls.DataParallel(model, ["cpu"] * 2)
    torch.testing.assert_close(net(X), model(X))
    model.layers["a"] = model.layers.pop("a")
    torch.testing.assert_close(net(X), model(X))
