"""MXNet's groups once more, through MXNet's own names and cut by its own rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import test_mxnet_groups
import test_mxnet_metrics
import test_mxnet_module_train
import torch
from mxnet_groups import GIVEN, Replay
from mxnet_metrics import metric
from mxnet_nets import arrays, build
from torch import nn
from traces import Case, cases, columns, tensor

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
            {name: torch.zeros_like(each) for name, each in arrays(step[key]).items()}
            for key in step
            if key != "op"
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
        self.executors.backward(
            grads or [torch.ones_like(each) for each in self.executors.get_outputs_merged()]
        )
        return {}

    def reshape(self, step: Mapping[str, Any]) -> dict[str, Any]:
        before = self.executors.get_batch_size()
        self.executors.reshape(described(step["data_descs"]), described(step["label_descs"]))
        return {"rebuilt": self.executors.get_batch_size() != before}

    def update_metric(self, step: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name in step["metrics"]:
            counted = metric(name, None, 3)
            self.executors.update_metric(counted, self.labels)
            record = counted.record()
            found[name] = {
                "get": [record["name"], record["value"]],
                "sum_metric": record["sum_metric"],
                "num_inst": record["num_inst"],
            }
        return {"metrics": found}

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


def of_case(case: Case) -> nn.Module:
    if case["name"] == "multi_input_output":
        return test_mxnet_groups.ThreeOutputs()
    if case["name"].startswith("layout_"):
        return test_mxnet_groups.Tanh()
    init = next(step["arg_params"] for step in case["steps"] if step["op"] == "set_params")
    return build(case["name"], init)


CASES = [
    *again("mxnet_group.json", 12),
    *again("mxnet_group_layouts.json", 19),
    *again("mxnet_group_grad_req.json", 11),
]


@pytest.mark.parametrize("case", CASES)
def test_groups(case: Case) -> None:
    shared = None
    if case["name"] == "shared_group_second":
        (main,) = [each.values[0] for each in CASES if each.values[0]["name"] == "shared_group_main"]
        shared = Renamed(main, of_case(main))
        shared.run()
        run = Renamed(case, of_case(main), shared)
    else:
        run = Renamed(case, of_case(case))
    ours = {"steps": run.run(), "grad_req_effective": run.effective()}
    if "get_outputs_begin_1_merged_shapes" in case:
        merged = ours["steps"][-1]["outputs_merged"]
        ours["get_outputs_begin_1_merged_shapes"] = [list(output.shape) for output in merged[1:]]
    case.check(ours, test_mxnet_groups.BATCH_NORM_TOLERANCES)


@pytest.mark.parametrize("case", again("mxnet_group_batchnorm.json", 4))
def test_batch_normalisation(case: Case) -> None:
    run = Renamed(case, of_case(case))
    ours = {"steps": columns(run.run()), "grad_req_effective": run.effective()}
    given = ["name", *(each.replace("steps.*.", "steps.") for each in GIVEN)]
    replace(case, given=given).in_columns().check(ours, test_mxnet_groups.BATCH_NORM_TOLERANCES)


METRICS = cases(
    "mxnet-nnabla/mxnet_metrics.json",
    num_cases=25,
    given=["metric", "kwargs", "kind", "batches", "runs.*.work_load_list", "runs.*.note"],
    name=lambda content: "-".join([content["metric"], *map(str, (content["kwargs"] or {}).values())]),
    through="compat",
)


@pytest.mark.parametrize("case", METRICS)
def test_metrics_are_updated_once_a_device(case: Case) -> None:
    ours = [count(case, run["work_load_list"]) for run in case["runs"]]
    case.check({"runs": ours}, test_mxnet_metrics.TOLERANCES)


def count(case: Case, loads: list[float]) -> dict[str, Any]:
    first = case["batches"][0]["pred"]["shape"]
    counted, records = metric(case["metric"], case["kwargs"], first[-1]), []
    data = [DataDesc("data", first)]
    executors = DataParallelExecutorGroup(
        nn.Identity(), ["cpu"] * len(loads), loads, data, None, None, True, False
    )
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


@pytest.mark.parametrize("case", RUNS)
def test_training(case: Case) -> None:
    tolerance = test_mxnet_module_train.TOLERANCES.get(case["optimizer"], test_mxnet_module_train.OTHERS)
    case.check({"steps": train(case)}, {"*": tolerance})


def train(case: Case) -> list[dict[str, Any]]:
    """Train by a group of executors and an optimizer that sees the gradients times a factor."""
    model, loads = build("mlp_softmax", case["params_init"]), case["work_load_list"]
    optimizer, records = test_mxnet_module_train.optimizer_of(case, model), []
    names = list(dict(model.named_parameters()))
    executors = DataParallelExecutorGroup(
        model,
        ["cpu"] * len(loads),
        loads,
        *shapes(case["steps"][0]),
        names,
        True,
        False,
        grad_req="add" if "grad_req_add" in case["name"] else "write",
    )
    with executors.core:
        executors.set_params(arrays(case["params_init"]), None)
        for number, step in enumerate(case["steps"], start=1):
            executors.reshape(*shapes(step))
            executors.forward(DataBatch([tensor(step["data"])], [tensor(step["label"])]))
            executors.backward([torch.ones_like(each) for each in executors.get_outputs_merged()])
            test_mxnet_module_train.set_rates(optimizer, case, step["lr"], number)
            with test_mxnet_module_train.rescaled(model, step["rescale_grad"]):
                optimizer.step()
            after = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
            executors.get_params(after, {})
            records.append({"params_after": after, "devices_agree": agree(executors)})
    return records


def agree(executors: DataParallelExecutorGroup) -> bool:
    first, *others = [list(replica.parameters()) for replica in executors.core.replicas]
    return all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def shapes(step: Mapping[str, Any]) -> tuple[list[DataDesc], list[DataDesc]]:
    data, label = step["data"]["shape"], step["label"]["shape"]
    return [DataDesc("data", data)], [DataDesc("softmax_label", label)]
