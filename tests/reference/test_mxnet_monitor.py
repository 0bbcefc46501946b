"""MXNet's monitor: the same numbers of the same tensors, on one device and on two."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from traces import Case, Tolerance, cases, tensor

import lockstep as ls
from lockstep.compat.mxnet import split_input_slice

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

ARGUMENTS = ["data", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "softmax_label"]
NOTHING = "softmax_backward_output1"
"""The original's gradient of the label: memory that nobody wrote, null in the trace. Ours has no such row."""

FORWARD = [
    (["fc1_output"], {"fc1_data": "data", "fc1_weight": "fc1_weight", "fc1_bias": "fc1_bias"}),
    (["tanh1_output"], {"tanh1_input0": "fc1_output"}),
    (["fc2_output"], {"fc2_data": "tanh1_output", "fc2_weight": "fc2_weight", "fc2_bias": "fc2_bias"}),
    (["softmax_output"], {"softmax_data": "fc2_output", "softmax_label": "softmax_label"}),
]
"""The original's operators in order: what each puts out, and what it calls what it reads."""

BACKWARD = [
    (
        ["softmax_backward_output0", NOTHING],
        {"softmax_backward_input0": "softmax_output", "softmax_backward_input1": "softmax_label"},
    ),
    (
        ["fc2_backward_output0", "fc2_backward_output1", "fc2_backward_output2"],
        {
            "fc2_backward_input0": "softmax_backward_output0",
            "fc2_backward_input1": "tanh1_output",
            "fc2_backward_input2": "fc2_weight",
        },
    ),
    (
        ["tanh1_backward_output"],
        {
            "tanh1_backward_input0": "fc2_backward_output0",
            "tanh1_backward_input1": "tanh1_output",
            "tanh1_backward_input2": "fc1_output",
        },
    ),
    (
        ["fc1_backward_output0", "fc1_backward_output1", "fc1_backward_output2"],
        {
            "fc1_backward_input0": "tanh1_backward_output",
            "fc1_backward_input1": "data",
            "fc1_backward_input2": "fc1_weight",
        },
    ),
]


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
        (outputs, hidden), (_, inputs) = params["fc2_weight"]["shape"], params["fc1_weight"]["shape"]
        self.fc1, self.tanh1 = nn.Linear(inputs, hidden), nn.Tanh()
        self.fc2, self.softmax = nn.Linear(hidden, outputs), Softmax()
        self.load_state_dict({name.replace("_", ".", 1): tensor(value) for name, value in params.items()})

    def forward(self, data: torch.Tensor, softmax_label: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.fc2(self.tanh1(self.fc1(data))), softmax_label)


def blocks(args: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """List the original's rows of a device, forward, backward and at the end: a name, and whose tensor it is.

    With monitor_all it also tells what an operator reads, an argument by its own name before. Ours tells each
    tensor once.
    """
    rows: list[list[tuple[str, str]]] = [[], [], [(name, name) for name in ARGUMENTS]]
    for block, operators in zip(rows, (FORWARD, BACKWARD), strict=False):
        for outputs, reads in operators:
            for name, tensor_name in reads.items() if args.get("monitor_all") else ():
                block.extend([(tensor_name, tensor_name)] if tensor_name in ARGUMENTS else [])
                block.append((name, tensor_name))
            block.extend((name, name) for name in outputs)
    pattern = args.get("pattern", ".*")
    return [[row for row in block if re.match(pattern, row[0])] for block in rows]


def monitor_of(args: dict[str, Any]) -> ls.Monitor:
    """Make ours of the original's arguments; the pattern is one of our names."""
    read = {tensor_name for block in blocks(args) for _, tensor_name in block}
    wanted = [re.escape(ours) for ours, theirs in NAMES.items() if theirs in read]
    options = {"stat": lambda each: each.abs().mean()} if "stat_func" in args else {}
    pattern = f"({'|'.join(wanted)})$" if wanted else "(?!)"
    return ls.Monitor(args["interval"], pattern=pattern, sort=args.get("sort", False), **options)


def as_the_original_tells_it(rows: list[Any], step: int, args: dict[str, Any], devices: int) -> list[list[Any]]:
    """Give our numbers by the original's names and in its order: block by block, device by device."""
    values: dict[tuple[str, int | None], float | None] = {(NAMES[row.name], row.replica): row.value for row in rows}
    assert len(values) == len(rows)
    assert all(row.step == step for row in rows)
    values.update({(NOTHING, device): None for device in range(devices)})
    told = [
        [step, name, values[tensor_name, device]]
        for block in blocks(args)
        for device in range(devices)
        for name, tensor_name in block
    ]
    return sorted(told, key=lambda row: str(row[1])) if args.get("sort") else told


@pytest.mark.parametrize("case", cases("mxnet-nnabla/mxnet_monitor.json", num_cases=12, given=GIVEN))
def test_replay(case: Case) -> None:
    first = case["steps"][0]
    slices = split_input_slice(first["data"]["shape"][0], case["work_load_list"])
    loads = [each.stop - each.start for each in slices]
    monitor = monitor_of(case["args"])
    steps = []
    with ls.ReplicaGroup(Net(case["params"]), ["cpu"] * len(loads), workloads=loads, input_grads=True) as group:
        group.install_monitor(monitor)
        group.bind([("data", first["data"]["shape"])], [("softmax_label", first["label"]["shape"])])
        for step in case["steps"]:
            monitor.tic()
            output = group.forward((tensor(step["data"]), tensor(step["label"])))
            group.backward(torch.ones_like(output))
            watched, rows = monitor.active, monitor.toc()
            assert {(row.replica, row.device) for row in rows} <= {(i, "cpu") for i in range(len(loads))}
            assert all(row.nonfinite == 0 for row in rows)
            told = as_the_original_tells_it(rows, monitor.step, case["args"], len(loads)) if watched else rows
            steps.append({"toc": told})
    # That of the description, with what `test_mxnet_groups.py` says of gradients.
    case.check({"steps": steps}, {"steps.*.toc.*": Tolerance(1e-4, floor=0.0, offset=1e-2)})
