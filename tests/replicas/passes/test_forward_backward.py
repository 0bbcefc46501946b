"""Forward and backward of shards: the same bits on any devices, the gradient of one device for any split."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.replicas.batch.inputs import Inputs, named_inputs, number_positions, positional_names, read_inputs
from lockstep.replicas.passes.forward_backward import Backward, Forward, ForwardBackward
from lockstep.replicas.pool.replica_set import ReplicaSet
from tests.support.backward import in_backward

DEVICES = [1, 2, 3, 5]


class Net(nn.Module):
    """What could tell one place from another: random numbers, buffers, a penalty, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training) * scale
        return {"scores": self.second(hidden), "penalty": self.first.weight.square().mean()}


def inputs_of(model: nn.Module, *args: Any) -> Inputs:
    names = number_positions(positional_names(model.forward), len(args))
    dims = {"scale": None} if "scale" in names else 0
    return read_inputs(
        args,
        {},
        list(named_inputs(args, {}, names)),
        dims,
        wanted=lambda _, tensor: tensor.is_floating_point(),
    )


def run(
    model: nn.Module, args: tuple[Any, ...], devices: int, num_shards: int | None = None, key: int = 3
) -> tuple[Forward, list[torch.Tensor], Backward]:
    with ReplicaSet(model, ["cpu"] * devices) as replicas:
        passes = ForwardBackward(replicas)
        try:
            torch.manual_seed(key)
            forward = passes.forward(inputs_of(model, *args), num_shards=num_shards)
            merged = forward.outputs.merged(torch.device("cpu"))
            backward = passes.backward(forward, [torch.ones_like(output) for output in merged])
        finally:
            passes.release()
    return forward, merged, backward


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(11, 4, generator=generator), torch.randn(6, generator=generator)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def bits(model: nn.Module, merged: list[torch.Tensor], backward: Backward) -> str:
    inputs = [backward.input_gradients[shard] for shard in sorted(backward.input_gradients)]
    return ls.digest(model, merged, backward.total(keep=True), inputs)


def test_with_a_number_of_shards_the_place_does_not_matter() -> None:
    found = set()
    for devices in DEVICES:
        model = net()
        _, merged, backward = run(model, arguments(), devices, num_shards=5)
        found.add(bits(model, merged, backward))
    assert len(found) == 1


def test_the_number_of_shards_and_the_key_do_matter() -> None:
    found = set()
    for num_shards, key in [(5, 3), (4, 3), (5, 4)]:
        model = net()
        _, merged, backward = run(model, arguments(), 2, num_shards, key)
        found.add(bits(model, merged, backward))
    assert len(found) == 3


class Drawing(nn.Module):
    """Draws in backward, through activation checkpointing that keeps no random state."""

    def __init__(self, *, use_reentrant: bool, preserve: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.use_reentrant, self.preserve = use_reentrant, preserve

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5) * torch.rand_like(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            self.noisy, x, use_reentrant=self.use_reentrant, preserve_rng_state=self.preserve
        )
        return result


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_in_backward_belong_to_the_shard(use_reentrant: bool, preserve: bool) -> None:
    found = set()
    for devices in DEVICES:
        torch.manual_seed(0)
        model = Drawing(use_reentrant=use_reentrant, preserve=preserve)
        _, merged, backward = run(model, arguments()[:1], devices, num_shards=5)
        found.add(bits(model, merged, backward))
    assert len(found) == 1


def draws_past(grad: torch.Tensor) -> torch.Tensor:
    """Scale a gradient by a number from the default generator, in a thread that no stream belongs to."""
    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(())))
    thread.start()
    thread.join()
    return grad * drawn[0]


class Past(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return in_backward(nn.functional.dropout(self.layer(x), 0.5), draws_past)


def test_what_backward_draws_past_its_stream_is_made_good() -> None:
    torch.manual_seed(0)
    model = Past()
    _, merged, backward = run(model, arguments()[:1], 1, num_shards=5)
    expected = bits(model, merged, backward)
    before = torch.get_rng_state()
    with pytest.warns(ls.RandomStreamWarning, match="drew from the default random generator"):
        _, merged, backward = run(model, arguments()[:1], 3, num_shards=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert bits(model, merged, backward) == expected


def test_a_forward_inside_another_ones_shard_draws_from_streams_of_its_own() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    inner = Inner()

    class Outer(nn.Module):
        def __init__(self, devices: int) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.devices = devices

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ReplicaSet(inner, ["cpu"] * self.devices) as replicas:
                passes = ForwardBackward(replicas)
                forward = passes.forward(inputs_of(inner, x), num_shards=2)
                (noisy,) = forward.outputs.merged(torch.device("cpu"))
                passes.release()
            result: torch.Tensor = self.layer(noisy)
            return result

    found = set()
    for inside in (1, 2):
        for outside in (1, 3):
            torch.manual_seed(0)
            _, merged, _ = run(Outer(inside), arguments()[:1], outside, num_shards=4)
            found.add(ls.digest(merged))
    assert len(found) == 1


class Running(nn.Module):
    """Uses a buffer that it also writes, so that the graph of a shard refers to it."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("running", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running.mul_(0.5).add_(x.detach().mean(0))
        return x * self.weight * self.running


def test_a_graph_keeps_the_buffers_of_its_own_shard() -> None:
    x = arguments()[0]
    model = Running()
    _, _, backward = run(model, (x,), 1, num_shards=2)
    (gradient,) = backward.total(keep=True)
    halves = [x[:6], x[6:]]
    wanted = sum((half * (0.5 + half.mean(0))).sum(0) for half in halves)
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(model.running, 0.5 + x.mean(0))


def test_forwards_may_overlap() -> None:
    x, scale = arguments()
    model = net()
    with ReplicaSet(model, ["cpu"] * 2) as replicas:
        passes = ForwardBackward(replicas)
        torch.manual_seed(1)
        kept = [passes.forward(inputs_of(model, part, scale), num_shards=3) for part in (x, x * 2)]
        grads = [torch.ones(11, 3), torch.tensor(1.0)]
        late = [ls.digest(passes.backward(each, grads).total(keep=False)) for each in kept]
        model.load_state_dict(net().state_dict())
        early = []
        torch.manual_seed(1)
        for part in (x, x * 2):
            forward = passes.forward(inputs_of(model, part, scale), num_shards=3)
            early.append(ls.digest(passes.backward(forward, grads).total(keep=False)))
        passes.release()
    assert late == early


def test_backward_frees_the_graphs_unless_told_otherwise() -> None:
    x, scale = arguments()
    model = net()
    with ReplicaSet(model, ["cpu"] * 2) as replicas:
        passes = ForwardBackward(replicas)
        forward = passes.forward(inputs_of(model, x, scale))
        grads = [torch.ones(11, 3), None]
        first = passes.backward(forward, grads, retain_graph=True)
        second = passes.backward(forward, grads)
        assert ls.digest(first.total(keep=True)) == ls.digest(second.total(keep=True))
        with pytest.raises(ls.OrderError, match="retain_graph=True"):
            passes.backward(forward, grads)
        with torch.no_grad():
            forward = passes.forward(inputs_of(model, x.requires_grad_(False), scale))
        with pytest.raises(ls.OrderError, match="with gradients enabled"):
            passes.backward(forward, grads)
        passes.release()


MODES: dict[str, tuple[Callable[[nn.Module], object], bool | None, list[bool]]] = {
    "as the model": (lambda model: model[1].eval(), None, [True, True, False]),
    "training keeps a frozen part": (lambda model: model[1].eval(), True, [True, True, False]),
    "training wakes a model": (lambda model: model.eval(), True, [True, True, True]),
    "evaluation": (lambda model: model[1].eval(), False, [False, False, False]),
    "evaluation as the model": (lambda model: model.eval(), None, [False, False, False]),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(name: str) -> None:
    prepare, training, wanted = MODES[name]
    seen: list[list[bool]] = []

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepare(model)
    before = [module.training for module in model.modules()]

    class Noting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append([module.training for module in self.modules()])
            return super().forward(x)

    model.__class__ = Noting
    with ReplicaSet(model, ["cpu"] * 2) as replicas:
        passes = ForwardBackward(replicas)
        passes.forward(inputs_of(model, arguments()[0]), training=training)
        after = [[module.training for module in replica.modules()] for replica in replicas.replicas]
        passes.release()
    assert seen == [wanted] * 2
    assert after == [before] * 2
