"""A module on a device of its own: where its tensors are, what it is saved as, what it refuses.

There may be no second device, so "meta" stands for one in forward, which keeps shapes without values.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

CPU, META = torch.device("cpu"), torch.device("meta")


class Seen(nn.Module):
    """Remember where inputs came in, and pass them on with every tensor doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self.inputs: list[torch.device] = []

    def forward(self, x: Any, *, extra: torch.Tensor | None = None) -> Any:
        parts = [*(x["pair"]), *([] if extra is None else [extra])]
        self.inputs = [part.device for part in parts]
        return {"outputs": [part * self.weight for part in parts], "name": x["name"]}


def devices_of(nest: Any) -> list[torch.device]:
    return [tensor.device for tensor in ls.nest.tensors(nest)]


@pytest.mark.parametrize(("output_device", "expected"), [(None, META), ("meta", META)])
def test_inputs_come_from_anywhere_and_outputs_go_where_they_shall(
    output_device: str | None, expected: torch.device
) -> None:
    module = ls.OnDevice(Seen(), "meta", output_device=output_device)
    nest = {"pair": (torch.ones(2), torch.ones(2, device="meta")), "name": "kept"}
    output = module(nest, extra=torch.ones(1))
    assert module.module.inputs == [META] * 3
    assert devices_of(output) == [expected] * 3
    assert output["name"] == "kept"
    assert devices_of(nest) == [CPU, META]


def test_an_output_can_go_to_another_device() -> None:
    module = ls.OnDevice(nn.Linear(3, 2), "cpu", output_device="meta")
    assert module(torch.ones(4, 3)).device == META


def test_what_is_there_already_is_not_copied() -> None:
    x = torch.ones(2, requires_grad=True)
    assert ls.OnDevice(nn.Identity(), "cpu", output_device="cpu")(x) is x


def test_gradients_are_those_of_the_bare_module() -> None:
    bare = nn.Linear(3, 2)
    wrapped = ls.OnDevice(copy.deepcopy(bare), "cpu")
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    bare(inputs[0]).sum().backward()
    wrapped(inputs[1]).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(bare.weight.grad, wrapped.module.weight.grad)


def test_the_network_around_moves_without_it_and_takes_it_along_to_another_dtype() -> None:
    inner = ls.OnDevice(nn.Linear(2, 2), "cpu")
    net = nn.Sequential(nn.Linear(2, 2), ls.OnDevice(nn.Sequential(nn.Linear(2, 2), inner), "meta"))
    assert [str(parameter.device) for parameter in net.parameters()] == ["cpu"] * 2 + ["meta"] * 2 + ["cpu"] * 2
    weights = inner.module.weight.detach().clone()
    net.to("meta")
    assert [str(parameter.device) for parameter in net.parameters()] == ["meta"] * 4 + ["cpu"] * 2
    assert torch.equal(inner.module.weight, weights)
    net.to("meta", torch.float64)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
    assert torch.equal(inner.module.weight, weights.double())


MOVES: dict[str, tuple[Callable[[nn.Module], object], torch.dtype]] = {
    "to a device": (lambda net: net.to("cpu"), torch.float32),
    "to a device and a dtype": (lambda net: net.to("cpu", torch.float64), torch.float64),
    "to a dtype": (lambda net: net.to(torch.bfloat16), torch.bfloat16),
    "cpu": (lambda net: net.cpu(), torch.float32),
    "half": (lambda net: net.half(), torch.float16),
    "without values": (lambda net: net.to_empty(device="cpu"), torch.float32),
    "shared memory": (lambda net: net.share_memory(), torch.float32),
    "layout": (lambda net: net.to("cpu", memory_format=torch.channels_last), torch.float32),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_on_meta_stays_there(name: str) -> None:
    part = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    net = nn.Sequential(nn.Linear(2, 2), ls.OnDevice(part, "meta"))
    kept = list(net.parameters())
    move, dtype = MOVES[name]
    move(net)
    assert all(map(operator.is_, net.parameters(), kept))
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    assert [str(each.device) for each in net.parameters()] == ["cpu"] * 2 + ["meta"] * 4
    assert {(each.device, each.dtype) for each in part.buffers()} == {(META, dtype), (META, torch.int64)}
    assert net[1](torch.ones(3, 2, 4, 4, dtype=dtype)).shape == (3, 2, 4, 4)


def test_a_move_that_fails_elsewhere_fails_as_it_does() -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("sprung")

    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match="sprung"):
            ls.OnDevice(nn.Linear(2, 2), device)._apply(fail)


def test_a_network_with_a_part_on_meta_can_be_placed_and_replicated() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.shapes = ls.OnDevice(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), "meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.shapes(x).shape[1]

    net = ls.DataParallel(Net(), ["cpu", "cpu"])
    x = torch.ones(4, 3)
    assert torch.equal(net(x), net.module.layer(x) * 5)
    net(x).sum().backward()
    assert net.module.layer.weight.grad is not None
    assert net.module.shapes.module[0].weight.grad is None
    net.release()


def test_it_is_moved_by_its_own_method_alone() -> None:
    module = ls.OnDevice(nn.Linear(2, 2), "cpu")
    assert module.move_to("meta", "cpu") is module
    assert (module.device, module.output_device) == (META, CPU)
    assert module.module.weight.device == META
    with pytest.raises(ValueError, match=r"`output_device` must be one of the devices .* got 'cuda:99'"):
        module.move_to("cpu", "cuda:99")
    assert module.module.weight.device == META


def test_its_state_is_the_bare_module_s() -> None:
    bare = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    net = nn.Sequential(copy.deepcopy(bare[0]), ls.OnDevice(copy.deepcopy(bare[1]), "cpu"))
    net.append(ls.OnDevice(ls.OnDevice(copy.deepcopy(bare[2]), "cpu"), "cpu"))
    wanted, found = bare.state_dict(), net.state_dict()
    assert list(found) == list(wanted)
    assert found._metadata == wanted._metadata
    assert ls.digest(net) == ls.digest(bare)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    net.load_state_dict(other.state_dict())
    assert ls.digest(net) == ls.digest(other)
    bare.load_state_dict(net.state_dict())
    assert ls.digest(bare) == ls.digest(other)


def test_a_state_that_does_not_fit_is_refused_by_the_names_it_was_saved_with() -> None:
    net = nn.Sequential(ls.OnDevice(ls.OnDevice(nn.Linear(3, 2), "cpu"), "cpu"))
    state = net.state_dict()
    state["0.bais"] = state.pop("0.bias")
    found = net.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["0.bais"])
    assert list(state) == ["0.weight", "0.bais"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "0.bias"'):
        net.load_state_dict(state)


def test_it_can_be_copied_and_pickled() -> None:
    module = ls.OnDevice(nn.Linear(3, 2), "cpu", "cpu")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert ls.digest(twin) == ls.digest(module)
        assert twin.module.weight is not module.module.weight
        assert torch.equal(twin(torch.ones(1, 3)), module(torch.ones(1, 3)))
        assert repr(twin) == repr(module)


def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match=r"`module` must be a torch.nn.Module, got a int"):
        ls.OnDevice(3, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`device` must be one of the devices .*, got 'nowhere'"):
        ls.OnDevice(nn.Identity(), "nowhere")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is there")
def test_gradients_go_back_to_each_input_s_device() -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    module = ls.OnDevice(Seen(), last, output_device="cpu")
    inputs = [torch.ones(2, requires_grad=True), torch.ones(2, device="cuda:0", requires_grad=True)]
    output = module({"pair": inputs, "name": ""})
    assert devices_of(output) == [CPU, CPU]
    sum(tensor.sum() for tensor in output["outputs"]).backward()
    assert [x.grad.device for x in inputs] == [x.device for x in inputs]
    assert module.module.weight.grad.device == torch.device(last)
    assert torch.cuda.current_device() == 0
