"""Torch7's DataParallelTable and nn.GPU: the same splits, outputs, gradients, updates and refusals.

The originals ran on a mock whose devices are labels. Here every device of `DataParallel` is a core, so labels
of devices are not compared. `needsSync` has no counterpart: replicas on one memory are never behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from tests.support.emulated.pool import on_emulated_devices
from torch import nn
from traces import Case, Tolerance, cases

import lockstep as ls

GIVEN = ["kind", "status", "note", "initial", "message", "call", "n", "add", "dim", "flatten", "gpus"]
GIVEN += ["device", "*_devices", "outdevice", "current_device_after", "*.device"]
GIVEN += [f"log.*.{key}" for key in ("op", "input", "gradOutput", "scale", "lr", "value", "error")]
GIVEN += [f"log.*.after.{key}" for key in ("current_device", "needsSync")]

# The description's. (Its numbers are short enough for sums to be exact in any order.)
NEAR = {"log.*": Tolerance(1e-10)}


def name_of(content: Mapping[str, Any]) -> str:
    if content["kind"] == "split":
        return f"split_{content['n']}_on_{content['gpus']}"
    return str(content.get("name", content.get("call")))


TABLE = cases("chainer-cunn/data_parallel_table.json", num_cases=88, given=GIVEN, name=name_of)


def of_kind(kind: str) -> list[Any]:
    return [each for each in TABLE if each.values[0] is None or each.values[0]["kind"] == kind]


class Linear(nn.Module):
    """y = x W' + b, in double precision; remembers what all replicas were called with."""

    seen: ClassVar[list[list[float]]] = []

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(given(weight)), nn.Parameter(given(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.flatten().tolist())
        return nn.functional.linear(x, self.weight, self.bias)


class ParallelTable(nn.Module):
    """Give the i-th of the inputs to the i-th module."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: list[Any]) -> list[Any]:
        return [part(each) for part, each in zip(self.parts, inputs, strict=True)]


def given(recorded: Any) -> Any:
    """Make tensors of a recorded nest; the original's empty tensor has no shape."""
    if isinstance(recorded, list):
        return [given(each) for each in recorded]
    shape = recorded["shape"] or [0, 2]
    return torch.tensor(recorded["data"], dtype=torch.float64).reshape(shape)


def recorded(parts: Any) -> Any:
    """Record a nest of tensors as the original did."""
    if isinstance(parts, list):
        return [recorded(each) for each in parts]
    return {"shape": list(parts.shape) if parts.numel() else [], "data": parts.flatten().tolist()}


def module_of(case: Case) -> nn.Module:
    parameters = case["initial"]["params"][0]
    layers = [Linear(*parameters[index : index + 2]) for index in range(0, len(parameters), 2)]
    if len(layers) == 3:
        return ParallelTable(layers[0], ParallelTable(*layers[1:]))
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


class Run:
    """A table of ours, and what is done to it."""

    def __init__(self, case: Case) -> None:
        module = module_of(case)
        for parameter, gradient in zip(module.parameters(), case["initial"]["grads"][0], strict=True):
            parameter.grad = given(gradient)
        self.net = ls.DataParallel(
            module, ["cpu"] * len(case["gpus"]), dim=case["dim"] - 1, flatten_parameters=case["flatten"]
        )
        self.inputs: list[torch.Tensor] = []
        self.nested: Any = None
        self.outputs: list[torch.Tensor] = []

    def step(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        result = getattr(self, entry["op"])(entry)
        return {**(result or {}), "after": self.state()}

    def state(self) -> dict[str, Any]:
        flat = self.net._flat  # before the look at replicas, which counts as a use
        flattened = flat is not None and flat.holds(list(self.net.parameters()))
        replicas = self.net.replicas
        gradients = [[gradient_of(each) for each in self.net.parameters()]]
        gradients += [[gradient_of(each) for each in replica.parameters()] for replica in replicas[1:]]
        return {
            "params": [recorded([each.detach() for each in replica.parameters()]) for replica in replicas],
            "grads": recorded(gradients),
            "flattened": flattened,
        }

    def forward(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        nested = given(entry["input"])
        self.inputs = ls.nest.tensors(nested)
        for each in self.inputs:
            each.requires_grad_()
        if "error" in entry:
            with pytest.raises(ValueError, match="`batch` must hold at least one sample"):
                self.net(torch.zeros(0, dtype=torch.float64))
            return {}
        Linear.seen.clear()
        output = self.net(nested)
        self.nested, self.outputs = nested, ls.nest.tensors(output)
        layers = sum(isinstance(each, Linear) for each in self.net.modules())
        return {
            "output": recorded(ls.nest.map_tensors(torch.detach, output)),
            "max_used": len(Linear.seen) // layers,
        }

    def backward(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        if entry.get("scale", 1) == 1:
            for each in self.inputs:
                each.grad = None
            grads = ls.nest.tensors(given(entry["gradOutput"]))
            torch.autograd.backward(self.outputs, grads, retain_graph=True)
            return self.input_gradient([each.grad for each in self.inputs])
        result = self.updateGradInput(entry)
        self.accGradParameters(entry)
        return result

    def updateGradInput(self, entry: Mapping[str, Any]) -> dict[str, Any]:  # noqa: N802 - the original's name
        self.output_grads = ls.nest.tensors(given(entry["gradOutput"]))
        return self.input_gradient(self.gradients(self.inputs))

    def accGradParameters(self, entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        parameters = list(self.net.parameters())
        for parameter, gradient in zip(parameters, self.gradients(parameters), strict=True):
            scaled = gradient * entry["scale"]
            parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)

    def gradients(self, inputs: list[Any]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.outputs, inputs, self.output_grads, retain_graph=True))

    def input_gradient(self, gradients: list[Any]) -> dict[str, Any]:
        rest = iter(gradients)
        return {"gradInput": recorded(ls.nest.map_tensors(lambda _: next(rest), self.nested))}

    @torch.no_grad()
    def updateParameters(self, entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        for parameter in self.net.parameters():
            parameter.sub_(entry["lr"] * parameter.grad)

    @torch.no_grad()
    def add_to_main_params(self, entry: Mapping[str, Any]) -> None:
        for parameter in self.net.parameters():
            parameter.add_(entry["value"])

    def zeroGradParameters(self, _entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        self.net.zero_grad()

    def zero_main_grads_only(self, _entry: Mapping[str, Any]) -> None:
        self.net.zero_grad()

    def getParameters(self, _entry: Mapping[str, Any]) -> dict[str, Any]:  # noqa: N802 - the original's name
        values, gradients = self.net.flat_parameters()
        return {"numel": [values.numel(), gradients.numel()]}

    def syncParameters(self, _entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        self.net.sync_parameters()

    def apply_noop(self, _entry: Mapping[str, Any]) -> None:
        self.net.apply(lambda _: None)

    def evaluate(self, _entry: Mapping[str, Any]) -> dict[str, Any]:
        return self.flags(self.net.eval())

    def training(self, _entry: Mapping[str, Any]) -> dict[str, Any]:
        return self.flags(self.net.train())

    def flags(self, net: nn.Module) -> dict[str, Any]:
        return {"self_train": net.training, "train_flags": [each.training for each in self.net.replicas]}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Give the gradient as the original holds it, zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("case", of_kind("split"))
def test_splits(case: Case) -> None:
    net = ls.DataParallel(Linear({"shape": [1, 1], "data": [1]}, {"shape": [1], "data": [0]}), case["gpus"])
    Linear.seen.clear()
    parts: Any
    try:
        output = net(torch.arange(case["n"], dtype=torch.float64)[:, None])
    except ValueError as error:
        parts = f"ValueError: {error}"
    else:
        assert output.flatten().tolist() == list(range(case["n"]))
        parts = [[int(value) for value in part] for part in sorted(Linear.seen)]
        parts += [[]] if len(parts) < case["gpus"] else []
    case.check({"parts": parts, "max_used": len(Linear.seen)})


@pytest.mark.parametrize("case", of_kind("steps"))
def test_steps(case: Case) -> None:
    run = Run(case)
    case.check({"log": [run.step(entry) for entry in case["log"]]}, NEAR)


def table(**options: Any) -> ls.DataParallel:
    return ls.DataParallel(nn.Linear(2, 2), **{"devices": ["cpu", "cpu"], **options})


CALLS: dict[str, Callable[[], object]] = {
    "DataParallelTable() without a dimension": table,
    "DataParallelTable(1, false, true): nccl without flattenParams": lambda: table(use_nccl=True),
    "add(module, {}) with no device": lambda: table(devices=[]),
    "add(module) without devices": lambda: ls.DataParallel(nn.Linear(2, 2)),
    "add with a table twice": lambda: table().place_on(["cpu"] * 3),
    "type(FloatTensor)": lambda: table().float()(torch.ones(3, 2)),
    "type(CudaDoubleTensor)": lambda: table().double()(torch.ones(3, 2).double()),
    "share": lambda: setattr(table().module, "weight", nn.Linear(2, 2).weight),
    "clone with sharing": lambda: shared(table())(torch.ones(3, 2)),
    "accUpdateGradParameters": lambda: table().accUpdateGradParameters,
    "forward(number)": lambda: table()(3),
    "forward(DoubleTensor) into a CudaTensor table": lambda: table()(torch.ones(3, 2).double()),
    "forward(FloatTensor) into a CudaTensor table": lambda: table()(torch.ones(3, 2)),
    "device that does not exist": lambda: table(devices=["cpu", "cuda:9"]),
    "threads() called twice before first use": lambda: [table().release() for _ in range(2)],
    'GPU(module, "cuda:0"): device must be a number': lambda: ls.OnDevice(nn.Linear(2, 2), "cpu"),
    "GPU(not a module, 1)": lambda: ls.OnDevice(1, "cpu"),  # type: ignore[arg-type]
    "GPU accUpdateGradParameters": lambda: ls.OnDevice(nn.Linear(2, 2), "cpu").accUpdateGradParameters,
}


def shared(net: ls.DataParallel) -> ls.DataParallel:
    """Copy a table whose parameters are the original's."""
    twin = copy.deepcopy(net, {id(each): each for each in net.parameters()})
    assert twin.module.weight is net.module.weight
    return twin


@pytest.mark.parametrize("case", of_kind("refused"))
def test_refused_calls(case: Case) -> None:
    try:
        CALLS[case["call"]]()
    except (AttributeError, TypeError, ValueError, ls.ReplicaError):
        accepted = False
    else:
        accepted = True
    case.check({"ok": accepted})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices, and they are not there")
@pytest.mark.parametrize("case", of_kind("gpu"))
def test_devices(case: Case) -> None:
    check_devices(case, "cuda")


@on_emulated_devices
@pytest.mark.parametrize("case", of_kind("gpu"))
def test_emulated_devices(case: Case) -> None:
    check_devices(case, "emulated")


def check_devices(case: Case, kind: str) -> None:
    """Put the original's device n to the n-th accelerator."""
    inner: list[list[torch.device]] = []
    numbers = case["input_devices"] if isinstance(case["input_devices"], list) else [case["input_devices"]]
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in numbers])

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
            inner.append([each.device for each in inputs])
            return [layer(each) for layer, each in zip(self.layers, inputs, strict=True)]

    def cuda(number: int) -> torch.device:
        return torch.device(kind, number - 1)

    out = case["outdevice"]
    net = ls.OnDevice(Table(), cuda(case["device"]), None if out is None else cuda(out))
    inputs = [torch.ones(3, 2, device=cuda(number), requires_grad=True) for number in numbers]
    outputs = net(*inputs)
    sum(each.sum().cpu() for each in outputs).backward()
    assert inner == [[cuda(case["device"])] * len(numbers)]
    assert {each.device for each in net.parameters()} == {cuda(case["device"])}
    assert {each.device for each in outputs} == {cuda(out or case["device"])}
    assert [each.grad.device for each in inputs] == [each.device for each in inputs]
    assert torch.get_device_module(kind).current_device() == 0
