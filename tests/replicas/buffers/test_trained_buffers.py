"""Buffers that require a gradient receive that of the bare module, or are refused where none is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.pool.replica_set import ReplicaSet

DEVICES = [["cpu"], ["cpu"] * 2, ["cpu"] * 3]
FORMS: dict[str, dict[str, Any]] = {"at once": {}, "in one graph": {"parallel_backward": False}}


class Net(nn.Module):
    """Scales and shifts by buffers, one of them under two names; counts in a third kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False).double()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3).double().requires_grad_())
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 3).double().requires_grad_())
        self.register_buffer("again", self.shift)
        self.register_buffer("unused", torch.ones(2).requires_grad_())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.norm(self.layer(x)) * self.scale + self.shift) * self.again


def batch() -> torch.Tensor:
    return torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def found(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in [*model.named_parameters(), *model.named_buffers()]}


def bare(shards: int = 1) -> dict[str, torch.Tensor | None]:
    """Compute in a loop of one's own, where each shard is normalised by itself."""
    model = Net()
    outputs = [model(piece) for piece in batch().tensor_split(shards)]
    torch.cat(outputs).square().mean().backward()
    return found(model)


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert (gradient is None) == (other[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, other[name], rtol=1e-12, atol=1e-14)  # float64, other orders


def through_data_parallel(devices: list[str], num_shards: int, **options: Any) -> dict[str, Any]:
    net = ls.DataParallel(Net(), devices, num_shards=num_shards, **options)
    net(batch()).square().mean().backward()
    net.release()
    return found(net.module)


def through_group(devices: list[str], num_shards: int, **options: Any) -> dict[str, Any]:
    model = Net()
    with ls.ReplicaGroup(model, devices, num_shards=num_shards, **options) as group:
        out = group.forward(batch())
        group.backward(out * (2 / out.numel()))
        assert all(found(model)[name] is each for name, each in group.gradients().items())
        assert {"scale", "shift", "unused"} <= group.gradients().keys()
    return found(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_gradients_through_data_parallel_are_those_of_the_bare_module(devices: list[str], form: str) -> None:
    assert bare()["shift"] is not None
    for shards in (1, 3):
        assert_alike(through_data_parallel(devices, shards, **FORMS[form]), bare(shards))


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_gradients_through_a_group_are_those_of_the_bare_module(devices: list[str]) -> None:
    for shards in (1, 3):
        assert_alike(through_group(devices, shards), bare(shards))


@pytest.mark.parametrize("memory", ["shared", "own"])
@pytest.mark.parametrize("run", [through_data_parallel, through_group])
def test_devices_change_no_bit(
    run: Callable[..., dict[str, Any]], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ls.digest(run(DEVICES[0], 5))
    if memory == "own":
        monkeypatch.setattr(ReplicaSet, "_shares_memory", lambda _, place, __: place == 0)
    assert {ls.digest(run(devices, 5)) for devices in DEVICES} == {wanted}


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_goes_on_to_what_a_buffer_was_computed_from(form: str) -> None:
    def run(net: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor | None:
        source = torch.linspace(0.1, 0.3, 3, dtype=torch.float64, requires_grad=True)
        model = Net()
        model.register_buffer("scale", source.exp())
        net(model)(batch()).sum().backward()
        return source.grad

    alone = run(lambda model: model)
    parallel = run(lambda model: ls.DataParallel(model, ["cpu"] * 2, num_shards=1, **FORMS[form]))
    assert alone is not None
    assert parallel is not None
    torch.testing.assert_close(parallel, alone, rtol=1e-12, atol=0)  # float64, another order


@pytest.mark.parametrize("form", FORMS)
def test_only_the_buffer_may_be_trained(form: str) -> None:
    module = Net()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    net = ls.DataParallel(module, ["cpu"] * 2, num_shards=1, **FORMS[form])
    net(batch()).square().mean().backward()
    assert_alike({"shift": module.shift.grad}, {"shift": bare()["shift"]})
    module.shift.requires_grad_(False)
    module.scale.requires_grad_(False)
    assert not net(batch()).requires_grad
    module.scale.requires_grad_(True)
    assert net(batch()).requires_grad
    with torch.no_grad():
        assert not net(batch()).requires_grad
    net.release()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_accumulate_over_forwards_that_live_together(form: str) -> None:
    def run(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
        module = Net()
        net = wrap(module)
        (net(batch()).sum() + net(batch() * 2).square().sum()).backward()
        net(batch()).sum().backward()
        return found(module)

    parallel = run(lambda module: ls.DataParallel(module, ["cpu"] * 2, num_shards=1, **FORMS[form]))
    assert_alike(parallel, run(lambda module: module))


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_may_be_trained_and_written_by_forward(form: str) -> None:
    class Counted(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how
            self.register_buffer("state", torch.ones(3, dtype=torch.float64).requires_grad_())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x[:, :3] * self.state
            if self.how == "in place":
                with torch.no_grad():
                    self.state += 1
            else:
                self.state = (self.state + 1).detach().requires_grad_()
            return out

    for how in ("in place", "rebound"):
        module = Counted(how)
        leaf = module.state
        net = ls.DataParallel(module, ["cpu"] * 2, num_shards=2, **FORMS[form])
        net(batch()).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, batch()[:, :3].sum(0), rtol=1e-12, atol=1e-14)  # another order
        assert module.state is leaf
        assert leaf.tolist() == [2.0, 2.0, 2.0]
        net.release()


def test_second_derivatives_reach_buffers() -> None:
    def run(wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        module = Net()
        net = wrap(module)
        (first,) = torch.autograd.grad(net(batch()).square().sum(), module.scale, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), module.shift)
        return second

    parallel = run(lambda module: ls.DataParallel(module, ["cpu"] * 2, num_shards=1, parallel_backward=False))
    torch.testing.assert_close(parallel, run(lambda module: module), rtol=1e-12, atol=1e-14)  # another order


def test_a_group_writes_adds_or_leaves_out_as_its_words_say() -> None:
    once = through_group(["cpu"], 2)
    for mode, factor in (("write", 1), ("add", 2)):
        model = Net()
        with ls.ReplicaGroup(model, ["cpu"] * 2, num_shards=2, grad_mode=mode) as group:
            for _ in range(2):
                out = group.forward(batch())
                group.backward(out * (2 / out.numel()))
            assert_alike({"shift": model.shift.grad}, {"shift": once["shift"] * factor})
            parts = group.gradients(merge=False)["shift"]
            assert_alike({"shift": parts[0] + parts[1]}, {"shift": once["shift"] * factor})
            group.zero_grad()
            assert model.shift.grad is None
            assert group.gradients()["shift"] is None
    model = Net()
    with ls.ReplicaGroup(model, ["cpu"] * 2, fixed=["again"], grad_mode={"scale": "add"}) as group:
        for _ in range(2):
            group.forward(batch())
            group.backward(torch.ones(11, 3))
        assert model.shift.grad is None
        assert model.scale.grad is not None
    assert model.layer.weight.grad is not None


def test_a_hook_on_a_buffer_sees_the_sum_once() -> None:
    model = Net()
    seen: list[torch.Tensor] = []
    model.shift.register_hook(seen.append)
    with ls.ReplicaGroup(model, ["cpu"] * 2, num_shards=3) as group:
        group.forward(batch())
        group.backward(torch.ones(11, 3))
    assert len(seen) == 1
    assert model.shift.grad is not None
    assert torch.equal(seen[0], model.shift.grad)


def test_modules_inside_each_other_pass_gradients_on() -> None:
    inner = ls.DataParallel(Net(), ["cpu"] * 2, num_shards=1)
    net = ls.DataParallel(nn.Sequential(inner), ["cpu"] * 2, num_shards=1)
    net(batch()).square().mean().backward()
    assert_alike({"shift": inner.module.shift.grad}, {"shift": bare()["shift"]})
    net.release()


def test_a_group_refuses_a_buffer_that_was_computed() -> None:
    model = Net()
    model.register_buffer("scale", (model.layer.weight[:, 0] * 2).double())
    state = torch.get_rng_state()
    with ls.ReplicaGroup(model, ["cpu"] * 2) as group:
        with pytest.raises(ValueError, match=r"`model` must have leaf tensors as buffers .* got 'scale'"):
            group.forward(batch())
        assert torch.equal(torch.get_rng_state(), state)
        with torch.no_grad():
            group.forward(batch())


# Updaters ------------------------------------------------------------------------------------------


def updater_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> ls.ParallelUpdater:
    data = ls.BatchIterator([(each, torch.zeros(3).double()) for each in batch()], 11)
    loss_fn = ls.supervised(nn.functional.mse_loss)
    return ls.ParallelUpdater(data, optimizer, model, devices=["cpu"] * 2, num_shards=2, loss_fn=loss_fn)


def test_an_updater_refuses_what_it_does_not_train() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"`model` must have no buffers that require gradients, got 'scale'. Register it as an",
    ):
        updater_of(model, optimizer)
    with pytest.raises(
        ValueError, match=r"`optimizer` must hold parameters .*, got its buffer 'scale' in group 0. Register"
    ):
        updater_of(model, torch.optim.SGD([model.layer.weight, model.scale], lr=0.1))


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean:UserWarning")  # statistics of the shard
def test_an_updater_refuses_it_later_and_goes_on_once_it_is_mended() -> None:
    model = Net()
    for buffer in model.buffers():
        buffer.requires_grad_(False)
    updater = updater_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    updater.update()
    before = ls.digest(model)
    model.shift.requires_grad_()
    with pytest.raises(ValueError, match="got 'shift'"):
        updater.update()
    assert ls.digest(model) == before
    assert updater.iteration == 1
    model.shift.requires_grad_(False)
    updater.update()
    assert updater.iteration == 2
    updater.finalize()
