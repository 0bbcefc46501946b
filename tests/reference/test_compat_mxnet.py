"""MXNet's groups once more, through MXNet's own names and cut by its own rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import test_mxnet_groups
import test_mxnet_metrics
import test_mxnet_module_train
import torch
from mxnet_groups import GIVEN, Replay, replay
from mxnet_metrics import Counted, metric
from mxnet_nets import arrays
from torch import nn
from traces import Case, cases, each_word, earlier, tensor

from lockstep.compat.mxnet import DataBatch, DataDesc, DataParallelExecutorGroup


def described(descs: Any) -> list[DataDesc]:
    return [DataDesc(desc["name"], desc["shape"], layout=desc["layout"]) for desc in descs or ()]


def layouts(case: Case) -> dict[str, str]:
    """Give outputs the layouts that the original's symbols have."""
    if "output_axes" in case:
        words = {0: "NC", 1: "CN", -1: "TC"}
        return {f"output[{index}]": words[axis] for index, axis in enumerate(case["output_axes"])}
    layout = case["data_descs"][0]["layout"]
    return {} if layout is None else {"output": layout}


class Renamed(Replay):
    """One case through `DataParallelExecutorGroup`, which cuts by the work loads that were given."""

    def __init__(self, case: Case, model: nn.Module, shared: Renamed | None = None) -> None:
        self.case, self.model = case, model
        self.names = [desc["name"] for desc in case["data_descs"]]
        self.refused = None
        self.step = -1
        self.executors = DataParallelExecutorGroup(
            model,
            ["cpu"] * case["contexts"],
            case["work_load_list"],
            described(case["data_descs"]),
            described(case["label_descs"]),
            case["param_names"],
            case["for_training"],
            case["inputs_need_grad"],
            shared_group=None if shared is None else shared.executors,
            fixed_param_names=case["fixed_param_names"],
            grad_req=case["grad_req_given"],
            output_layouts=layouts(case),
        )
        self.group = self.executors.core

    def take_slices(self) -> None:
        """Leave the slices to MXNet's rule."""

    def set_params(self, step: Mapping[str, Any]) -> dict[str, Any]:
        self.executors.set_params(arrays(step["arg_params"]), arrays(step["aux_params"]))
        return {"arg_params": step["arg_params"], "aux_params": step["aux_params"]}

    def get_params(self, step: Mapping[str, Any]) -> dict[str, Any]:
        given = [
            {name: torch.zeros_like(each) for name, each in arrays(step[key]).items()} for key in step if key != "op"
        ]
        self.executors.get_params(*given)
        arg_params, aux_params = given
        return {"arg_params": arg_params if self.refused is None else self.refused, "aux_params": aux_params}

    def forward(self, step: Mapping[str, Any]) -> dict[str, Any]:
        self.labels = [tensor(array) for array in step["label"] or ()]
        batch = DataBatch([tensor(array) for array in step["data"]], self.labels)
        self.executors.forward(batch, step["is_train"])
        return {}

    def backward(self, step: Mapping[str, Any]) -> dict[str, Any]:
        # The loss layers of the original pass over what comes.
        grads = [tensor(each) for each in step["out_grads"] or ()]
        self.executors.backward(grads or [torch.ones_like(each) for each in self.executors.get_outputs_merged()])
        return {}

    def reshape(self, step: Mapping[str, Any]) -> dict[str, Any]:
        before = self.executors.get_batch_size()
        self.executors.reshape(described(step["data_descs"]), described(step["label_descs"]))
        return {"rebuilt": self.executors.get_batch_size() != before}

    def reshape_failed(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for shapes that the original refused, which says nothing about the labels; ours stay as they were."""
        bound = self.group.batch_size
        with pytest.raises(ValueError, match="must leave a sample for every device"):
            self.executors.reshape(described(step["data_descs"]), None)
        assert self.group.batch_size == bound
        return {"error": step["error"]}

    def measure(self, counted: Counted) -> None:
        self.executors.update_metric(counted, self.labels)

    def observe(self, step: Mapping[str, Any]) -> dict[str, Any]:
        ways = {
            "batch_size": self.executors.get_batch_size,
            "outputs_per_device": self.executors.get_outputs,
            "outputs_merged": self.executors.get_outputs_merged,
        }
        return {**super().observe(step), **{key: way() for key, way in ways.items() if key in step}}

    def data_grads(self, *, merge: bool) -> list[Any]:
        return self.executors.get_input_grads_merged() if merge else self.executors.get_input_grads()


def again(file: str, num_cases: int) -> list[Any]:
    return cases(f"mxnet-nnabla/{file}", num_cases=num_cases, given=GIVEN, through="compat")


CASES = each_word(
    [*again("mxnet_group.json", 12), *again("mxnet_group_layouts.json", 19), *again("mxnet_group_grad_req.json", 11)]
)


@pytest.mark.parametrize("case", CASES)
def test_groups(case: Case) -> None:
    case.check(replay(case, Renamed, earlier(case, CASES)), test_mxnet_groups.TOLERANCES)


@pytest.mark.parametrize("case", each_word(again("mxnet_group_batchnorm.json", 4)))
def test_batch_normalisation(case: Case) -> None:
    test_mxnet_groups.check_columns(case, Renamed)


METRICS = cases(
    "mxnet-nnabla/mxnet_metrics.json",
    num_cases=25,
    given=["metric", "kwargs", "kind", "batches", "runs.*.work_load_list", "runs.*.note"],
    name=lambda content: "-".join([content["metric"], *map(str, (content["kwargs"] or {}).values())]),
    through="compat",
)


@pytest.mark.parametrize("case", each_word(METRICS))
def test_metrics_are_updated_once_a_device(case: Case) -> None:
    ours = [count(case, run["work_load_list"]) for run in case["runs"]]
    case.check({"runs": ours}, test_mxnet_metrics.TOLERANCES)


def count(case: Case, loads: list[float]) -> dict[str, Any]:
    first = case["batches"][0]["pred"]["shape"]
    counted, records = metric(case["metric"], case["kwargs"], first[-1]), []
    data = [DataDesc("data", first)]
    executors = DataParallelExecutorGroup(nn.Identity(), ["cpu"] * len(loads), loads, data, None, None, True, False)
    with executors.core:
        for batch in case["batches"]:
            executors.reshape([DataDesc("data", batch["pred"]["shape"])], None)
            executors.forward(DataBatch([tensor(batch["pred"])]))
            executors.update_metric(counted, [tensor(batch["label"])])
            records.append(counted.record())
            if len(records) == 1:
                counted.reset_local()
        slices = [[run.start, run.stop] for run in executors.core.slices]
    return {"slices": slices, "after_each_update": records}


RUNS = cases(
    "mxnet-nnabla/mxnet_module_train.json",
    num_cases=13,
    key="runs",
    given=test_mxnet_module_train.GIVEN,
    through="compat",
)


class Executors(test_mxnet_module_train.CoreGroup):
    """The group of a case, in MXNet's names."""

    def __init__(self, case: Case, model: nn.Module, mode: str) -> None:
        loads = case["work_load_list"]
        self.model, names = model, [name for name, _ in model.named_parameters()]
        first = case["steps"][0]
        described = shapes(first["data"]["shape"], first["label"]["shape"])
        self.executors = DataParallelExecutorGroup(
            model, ["cpu"] * len(loads), loads, *described, names, True, False, grad_req=mode
        )
        self.core = self.executors.core

    def set_parameters(self, recorded: Mapping[str, Any]) -> None:
        self.executors.set_params(arrays(recorded), None)

    def run(self, data: torch.Tensor, label: torch.Tensor) -> None:
        self.executors.reshape(*shapes(data.shape, label.shape))
        self.executors.forward(DataBatch([data], [label]))
        self.executors.backward([torch.ones_like(each) for each in self.executors.get_outputs_merged()])

    def parameters(self) -> dict[str, torch.Tensor]:
        after = {name: torch.zeros_like(each) for name, each in self.model.named_parameters()}
        self.executors.get_params(after, {})
        return after


@pytest.mark.parametrize("case", each_word(RUNS))
def test_training(case: Case) -> None:
    test_mxnet_module_train.replay(case, Executors)


def shapes(data: Sequence[int], label: Sequence[int]) -> tuple[list[DataDesc], list[DataDesc]]:
    return [DataDesc("data", data)], [DataDesc("softmax_label", label)]
