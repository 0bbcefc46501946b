"""MXNet's monitor: the same numbers of the same tensors, on one device and on two."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from traces import Case, Tolerance, cases, tensor

import lockstep as ls

GIVEN = ["args", "work_load_list", "params", "steps.*.data", "steps.*.label"]

NAMES = {
    "data": "data",
    "softmax_label": "softmax_label",
    "fc2.output.grad": "softmax_backward_output0",
    "tanh1.output.grad": "fc2_backward_output0",
    "fc2.weight.grad": "fc2_backward_output1",
    "fc2.bias.grad": "fc2_backward_output2",
    "fc1.output.grad": "tanh1_backward_output",
    "data.grad": "fc1_backward_output0",
    "fc1.weight.grad": "fc1_backward_output1",
    "fc1.bias.grad": "fc1_backward_output2",
    **{f"{name}.output": f"{name}_output" for name in ("fc1", "tanh1", "fc2", "softmax")},
    **{f"{layer}.{kind}": f"{layer}_{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")},
}
"""What the original calls the rows of ours; it names a gradient by the operator that made it."""

INPUTS = {
    "fc1_data": "data",
    "tanh1_input0": "fc1_output",
    "fc2_data": "tanh1_output",
    "softmax_data": "fc2_output",
    "softmax_backward_input0": "softmax_output",
    "softmax_backward_input1": "softmax_label",
    "fc2_backward_input0": "softmax_backward_output0",
    "fc2_backward_input1": "tanh1_output",
    "fc2_backward_input2": "fc2_weight",
    "tanh1_backward_input0": "fc2_backward_output0",
    "tanh1_backward_input1": "tanh1_output",
    "tanh1_backward_input2": "fc1_output",
    "fc1_backward_input0": "tanh1_backward_output",
    "fc1_backward_input1": "data",
    "fc1_backward_input2": "fc1_weight",
}
"""With monitor_all the original repeats every tensor for each operator that reads it; ours tells it once."""

NOTHING = "softmax_backward_output1"
"""The original's gradient of the label: memory that nobody wrote, null in the trace. Ours has no such row."""


class SoftmaxOutput(torch.autograd.Function):
    """Softmax whose gradient is that of the summed cross entropy, whatever comes from above."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = scores.softmax(1)
        ctx.save_for_backward(output, label)
        return output

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        output, label = ctx.saved_tensors
        return output - nn.functional.one_hot(label.long(), output.shape[1]), None


class Softmax(nn.Module):
    def forward(self, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return SoftmaxOutput.apply(scores, label)


class Net(nn.Module):
    """The originals' mlp_softmax, its layers by their names."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.fc1, self.tanh1, self.fc2, self.softmax = nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), Softmax()
        self.load_state_dict({name.replace("_", ".", 1): tensor(value) for name, value in params.items()})

    def forward(self, data: torch.Tensor, softmax_label: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.fc2(self.tanh1(self.fc1(data))), softmax_label)


def monitor_of(args: dict[str, Any]) -> ls.Monitor:
    """Make ours of the original's arguments; the pattern is one of our names."""
    wanted = [ours for ours, theirs in NAMES.items() if re.match(args.get("pattern", ".*"), theirs)]
    options = {"stat": lambda each: each.abs().mean()} if "stat_func" in args else {}
    pattern = "|".join(f"{re.escape(name)}$" for name in wanted)
    return ls.Monitor(args["interval"], pattern=pattern, sort=args.get("sort", False), **options)


def in_the_original_s_order(rows: list[Any], original: list[Any]) -> list[list[Any]]:
    """Name and order our rows as the original does; rows of one name stay in order, and none is left."""
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        values[row.step, NAMES[row.name]].append(row.value)
    arranged = [
        [step, name, None if name == NOTHING else values[step, name].pop(0)] for step, name, _ in original
    ]
    assert not any(values.values())
    return arranged


def repeated_as_in_the_original(rows: list[Any], original: list[Any], devices: int) -> list[list[Any]]:
    """Repeat our rows for each reader: all forwards, all backwards, then all arguments, device by device."""
    values = {(NAMES[row.name], row.replica): row.value for row in rows}
    arguments = 6
    forward = [name for _, name, _ in original].index("softmax_output") + 1
    backward = len(original) // devices - forward - arguments
    blocks = [[device] * size for size in (forward, backward, arguments) for device in range(devices)]
    owners = [device for block in blocks for device in block]
    return [
        [step, name, None if name == NOTHING else values[INPUTS.get(name, name), device]]
        for (step, name, _), device in zip(original, owners, strict=True)
    ]


@pytest.mark.parametrize("case", cases("mxnet-nnabla/mxnet_monitor.json", num_cases=12, given=GIVEN))
def test_replay(case: Case) -> None:
    loads = case["work_load_list"]
    monitor = monitor_of(case["args"])
    steps = []
    with ls.ReplicaGroup(
        Net(case["params"]), ["cpu"] * len(loads), workloads=loads, input_grads=True
    ) as group:
        group.install_monitor(monitor)
        for step in case["steps"]:
            data, label = tensor(step["data"]), tensor(step["label"])
            if not steps:
                group.bind([("data", tuple(data.shape))], [("softmax_label", tuple(label.shape))])
            monitor.tic()
            output = group.forward((data, label))
            group.backward(torch.ones_like(output))
            rows = monitor.toc()
            assert {(row.replica, row.device) for row in rows} <= {(i, "cpu") for i in range(len(loads))}
            assert all(row.nonfinite == 0 for row in rows)
            if "monitor_all" in case["args"]:
                steps.append({"toc": repeated_as_in_the_original(rows, step["toc"], len(loads))})
            else:
                steps.append({"toc": in_the_original_s_order(rows, step["toc"])})
    case.check(
        {"steps": steps}, {"steps.*.toc.*": Tolerance(1e-4, floor=0.0, offset=1e-3)}
    )  # that of the README
