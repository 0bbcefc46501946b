"""Torch7's tables once more, through Torch7's own names: dimensions from 1, `add`, explicit backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import test_data_parallel_table
import torch
from test_data_parallel_table import GIVEN, NEAR, Linear, given, name_of, recorded
from torch import nn
from traces import Case, cases, each_word

import lockstep as ls
from lockstep.compat.torch7 import GPU, DataParallelTable

TABLE = cases("chainer-cunn/data_parallel_table.json", num_cases=88, given=GIVEN, name=name_of, through="compat")


def of_kind(kind: str) -> list[Any]:
    return [each for each in TABLE if each.values[0] is None or each.values[0]["kind"] == kind]


class Run(test_data_parallel_table.Run):
    """A table with Torch7's names, and what is done to it by them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        module = self.net.module
        self.net.release()
        self.table = DataParallelTable(case["dim"], case["flatten"])
        if case["add"] == "each":
            for _ in case["gpus"]:
                self.table.add(module, "cpu")
        else:
            self.table.add(module, ["cpu"] * len(case["gpus"]))
        self.net = self.table.table

    def backward(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        self.table.forward(self.nested)
        gradient = self.table.backward(self.nested, given(entry["gradOutput"]), entry.get("scale", 1.0))
        return {"gradInput": recorded(gradient)}

    def updateParameters(self, entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        self.table.update_parameters(entry["lr"])

    def zeroGradParameters(self, _entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        self.table.zero_grad_parameters()

    def getParameters(self, _entry: Mapping[str, Any]) -> dict[str, Any]:  # noqa: N802 - the original's name
        values, gradients = self.table.get_parameters()
        return {"numel": [values.numel(), gradients.numel()]}

    def syncParameters(self, _entry: Mapping[str, Any]) -> None:  # noqa: N802 - the original's name
        self.table.sync_parameters()


@pytest.mark.parametrize("case", each_word(of_kind("steps")))
def test_steps(case: Case) -> None:
    run = Run(case)
    try:
        case.check({"log": [run.step(entry) for entry in case["log"]]}, NEAR)
    finally:
        run.table.release()


@pytest.mark.parametrize("case", each_word(of_kind("split")))
def test_splits(case: Case) -> None:
    layer = Linear({"shape": [1, 1], "data": [1]}, {"shape": [1], "data": [0]})
    with table(layer, ["cpu"] * case["gpus"]) as net:
        Linear.seen.clear()
        parts: Any
        try:
            net.forward(torch.arange(case["n"], dtype=torch.float64)[:, None])
        except ValueError as error:
            parts = f"ValueError: {error}"
        else:
            parts = [[int(value) for value in part] for part in sorted(Linear.seen)]
            parts += [[]] if len(parts) < case["gpus"] else []
    case.check({"parts": parts, "max_used": len(Linear.seen)})


@contextmanager
def table(module: nn.Module | None = None, devices: Any = ("cpu", "cpu")) -> Iterator[DataParallelTable]:
    """Make a table, and end its threads."""
    net = DataParallelTable(1).add(nn.Linear(2, 2) if module is None else module, devices)
    try:
        yield net
    finally:
        net.release()


def forward(x: Any, *, double: bool = False) -> None:
    with table() as net:
        (net.double() if double else net.float())(x)


CALLS: dict[str, Callable[[], object]] = {
    **test_data_parallel_table.CALLS,
    "DataParallelTable() without a dimension": DataParallelTable,  # type: ignore[dict-item]
    "DataParallelTable(1, false, true): nccl without flattenParams": lambda: DataParallelTable(1, False, True),
    "add(module, {}) with no device": lambda: DataParallelTable(1).add(nn.Linear(2, 2), []),
    "add(module) without devices": lambda: DataParallelTable(1).add(nn.Linear(2, 2)),  # type: ignore[call-arg]
    "add with a table twice": lambda: DataParallelTable(1).add(nn.Linear(2, 2), ["cpu"]).add(nn.Linear(2, 2), ["cpu"]),
    "type(FloatTensor)": lambda: forward(torch.ones(3, 2)),
    "type(CudaDoubleTensor)": lambda: forward(torch.ones(3, 2).double(), double=True),
    "forward(number)": lambda: forward(3),
    "forward(DoubleTensor) into a CudaTensor table": lambda: forward(torch.ones(3, 2).double()),
    "forward(FloatTensor) into a CudaTensor table": lambda: forward(torch.ones(3, 2)),
    "device that does not exist": lambda: DataParallelTable(1).add(nn.Linear(2, 2), ["cpu", 10]),
    "threads() called twice before first use": lambda: DataParallelTable(1).threads(print).threads(print),
    'GPU(module, "cuda:0"): device must be a number': lambda: GPU(nn.Linear(2, 2), "cpu"),
    "GPU(not a module, 1)": lambda: GPU(1, "cpu"),  # type: ignore[arg-type]
    "GPU accUpdateGradParameters": lambda: GPU(nn.Linear(2, 2), "cpu").accUpdateGradParameters,
}


@pytest.mark.parametrize("case", of_kind("refused"))
def test_refused_calls(case: Case) -> None:
    try:
        CALLS[case["call"]]()
    except (AttributeError, TypeError, ValueError, ls.OrderError, ls.ReplicaError):
        accepted = False
    else:
        accepted = True
    case.check({"ok": accepted})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices, and they are not there")
@pytest.mark.parametrize("case", of_kind("gpu"))
def test_numbers_of_devices(case: Case) -> None:
    """Put the original's device n to the n-th GPU, by its number."""
    net = GPU(nn.Identity(), case["device"], case["outdevice"])
    assert net.device == torch.device("cuda", case["device"] - 1)
    assert net(torch.ones(1)).device == torch.device("cuda", (case["outdevice"] or case["device"]) - 1)
