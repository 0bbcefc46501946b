"""Replay what was done to an executor group of MXNet on a ReplicaGroup, and record what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mxnet_metrics import Counted, metric
from mxnet_nets import arrays, model_of
from torch import nn
from traces import Case, tensor

import lockstep as ls
from lockstep import nest

GIVEN = ["contexts", "work_load_list", "data_descs", "label_descs", "param_names", "arg_names", "aux_names"]
GIVEN += ["output_names", "for_training", "inputs_need_grad", "grad_req_given", "fixed_param_names"]
GIVEN += ["steps.*.op", "steps.*.is_train", "steps.*.data", "steps.*.label", "steps.*.out_grads"]
GIVEN += ["steps.*.data_descs", "steps.*.label_descs", "steps.*.values", "data_axes", "output_axes"]


def batch_axis(layout: str | None) -> int | None:
    """Read an axis from a layout as the original does: the first where there is none, None without an N."""
    if layout is None:
        return 0
    return layout.index("N") if "N" in layout else None


def described(descs: Any) -> list[tuple[str, list[int]]]:
    return [(desc["name"], desc["shape"]) for desc in descs or ()]


class Replay:
    """One case.

    The slices are the original's: each device's workload is the length of the slice it had there. How
    slices are cut is replayed in `test_mxnet_slices.py`.

    Args:
        case: As recorded.
        model: With parameters by the original's names.
        shared: A replay whose parameters and gradients are used.
    """

    def __init__(self, case: Case, model: nn.Module, shared: Replay | None = None) -> None:
        self.case = case
        self.model = model
        self.names = [desc["name"] for desc in case["data_descs"]]
        self.metrics: dict[str, Any] = {}
        self.refused: str | None = None
        self.seen: dict[str, Any] = {}
        descs = [*case["data_descs"], *(case["label_descs"] or ())]
        axes = case.content.get("output_axes", [batch_axis(case["data_descs"][0]["layout"])])
        axes = [None if axis == -1 else axis for axis in axes]
        names = ["output"] if len(axes) == 1 else [f"output[{index}]" for index in range(len(axes))]
        modes, inputs, fixed = self.grad_modes()
        self.group = ls.ReplicaGroup(
            model,
            ["cpu"] * case["contexts"],
            batch_dim={desc["name"]: batch_axis(desc["layout"]) for desc in descs},
            output_dim=dict(zip(names, axes, strict=True)),
            grad_mode=modes,
            fixed=fixed,
            input_grads=inputs,
            training=case["for_training"],
            shared_group=None if shared is None else shared.group,
        )
        self.group.bind(described(case["data_descs"]), described(case["label_descs"]))
        self.step = -1
        self.take_slices()

    def grad_modes(self) -> tuple[Any, Any, Any]:
        """Read what was asked for: words for parameters and for inputs, and the names of fixed parameters.

        A list is by argument, and taken literally; a dict says it for inputs too.
        """
        given, inputs = self.case["grad_req_given"], self.case["inputs_need_grad"]
        fixed = self.case["fixed_param_names"] or ()
        if isinstance(given, str):
            return given, inputs, fixed
        if isinstance(given, list):
            given, fixed = dict(zip(self.case["arg_names"], given, strict=True)), ()
        words = {**dict.fromkeys(self.names, "write" if inputs else "null"), **given}
        parameters = {name: word for name, word in words.items() if name in self.case["param_names"]}
        return parameters, {name: words[name] for name in self.names}, fixed

    def effective(self) -> dict[str, str]:
        """Say what becomes of the gradient of each argument; nothing does in a group that does not train."""
        if not self.group._trains:
            return dict.fromkeys(self.case["arg_names"], "null")
        words = {**self.group._input_modes.by_path(self.names), **self.group._modes}
        return {name: words.get(name, "null") for name in self.case["arg_names"]}

    def take_slices(self) -> None:
        """Give the devices the original's slices up to the next time they change."""
        later = self.case["steps"][self.step + 1 :]
        slices = next(step["slices"] for step in later if step["op"] == "observe")
        self.group.workloads = [float(stop - start) for start, stop in slices]

    def run(self) -> list[dict[str, Any]]:
        """Do all steps; give what each came to."""
        records = []
        with self.group:
            for number, step in enumerate(self.case["steps"]):
                self.step = number
                records.append(getattr(self, step["op"])(step))
        return records

    def record(self) -> dict[str, Any]:
        """Do all steps; give our record of the whole case."""
        ours: dict[str, Any] = {"steps": self.run(), "grad_req_effective": self.effective()}
        if "get_outputs_begin_1_merged_shapes" in self.case:
            merged = ours["steps"][-1]["outputs_merged"]
            ours["get_outputs_begin_1_merged_shapes"] = [list(output.shape) for output in merged[1:]]
        return ours

    def memory_shared_with(self, other: Replay) -> dict[str, bool]:
        pairs = list(zip(self.model.parameters(), other.model.parameters(), strict=True))
        return {
            "param_memory_shared": all(a.data_ptr() == b.data_ptr() for a, b in pairs),
            "grad_memory_shared": all(a.grad is b.grad is not None for a, b in pairs),
        }

    def set_params(self, step: Mapping[str, Any]) -> dict[str, Any]:
        self.group.set_parameters(arrays(step["arg_params"]), arrays(step["aux_params"]))
        return {"arg_params": step["arg_params"], "aux_params": step["aux_params"]}

    def set_params_per_device(self, step: Mapping[str, Any]) -> dict[str, Any]:
        values: Any = {name: [tensor(each) for each in parts] for name, parts in step["values"].items()}
        try:
            self.group.set_parameters(values)
        except TypeError as error:
            self.refused = f"TypeError: {error}"
        return {}

    def get_params(self, step: Mapping[str, Any]) -> dict[str, Any]:
        parameters, buffers = self.group.get_parameters()
        ours: Any = parameters if self.refused is None else self.refused
        return {"arg_params": ours, "aux_params": buffers if step["aux_params"] else {}}

    def forward(self, step: Mapping[str, Any]) -> dict[str, Any]:
        batch = [tensor(array) for array in [*step["data"], *(step["label"] or ())]]
        self.labels = batch[len(step["data"]) :]
        self.group.forward(tuple(batch), training=step["is_train"])
        return {}

    def backward(self, step: Mapping[str, Any]) -> dict[str, Any]:
        # The loss layers of the original pass over what comes.
        grads = [tensor(each) for each in step["out_grads"] or ()]
        ones = [torch.ones_like(each) for each in self.group.outputs()]
        self.group.backward(grads or ones, retain_graph=True)  # the original may go backward again
        return {}

    def reshape(self, step: Mapping[str, Any]) -> dict[str, Any]:
        done = self.group.reshape(described(step["data_descs"]), described(step["label_descs"]))
        self.take_slices()
        return {"rebuilt": done}

    def reshape_failed(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out what the original's rule for slices refused: the core has another, and keeps the shapes."""
        assert "Too many slices" in step["error"]["message"], step
        return {"error": step["error"]}

    def update_metric(self, step: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name in step["metrics"]:
            counted = metric(name, None, 3)
            self.measure(counted)
            record = counted.record()
            found[name] = {
                "get": [record["name"], record["value"]],
                "sum_metric": record["sum_metric"],
                "num_inst": record["num_inst"],
            }
        return {"metrics": found}

    def measure(self, counted: Counted) -> None:
        self.group.update_metric(counted, self.labels[0], per_device=True)

    def observe(self, step: Mapping[str, Any]) -> dict[str, Any]:
        ways = {
            "batch_size": lambda: self.group.batch_size,
            "slices": lambda: [[run.start, run.stop] for run in self.group.slices],
            "output_shapes": self.output_shapes,
            "outputs_per_device": lambda: self.group.outputs(merge=False),
            "outputs_merged": self.group.outputs,
            "param_grads_per_device": lambda: self.gradients(merge=False),
            "param_grads_sum": lambda: self.gradients(merge=True),
            "input_grads_per_device": lambda: self.data_grads(merge=False),
            "input_grads_merged": lambda: self.data_grads(merge=True),
            "aux_per_device": lambda: {
                name: [buffer] * len(self.group.devices) for name, buffer in self.group.get_parameters()[1].items()
            },
        }
        found = {key: ways[key]() for key in step if key != "op"}
        return {key: nest.map_tensors(torch.clone, value) for key, value in found.items()}

    def output_shapes(self) -> list[Any]:
        names = self.case["output_names"]
        return [[name, list(shape)] for name, (_, shape) in zip(names, self.group.output_shapes(), strict=True)]

    def gradients(self, *, merge: bool) -> dict[str, Any]:
        found = self.group.gradients(merge=merge)
        return {name: found[name] for name in self.case["param_names"]}

    def data_grads(self, *, merge: bool) -> list[Any]:
        return self.group.input_grads(merge=merge)[: len(self.names)]


def replay(case: Case, group: type[Replay] = Replay, before: Sequence[Case] = ()) -> dict[str, Any]:
    """Run a case and record it.

    A case that has parameters and sets none runs on the memory of another group, that of the nearest case
    before it with the same parameters.

    Args:
        case: As recorded.
        group: Through which of our names.
        before: The cases before it in the file.
    """
    if not _borrows(case):
        run = group(case, model_of(case))
        return run.record()
    owner = next(each for each in reversed(before) if each["param_names"] == case["param_names"] and not _borrows(each))
    first = group(owner, model_of(owner))
    first.run()
    second = group(case, model_of(owner), first)
    ours = second.record()
    assert second.memory_shared_with(first) == case.shared["shared_group_facts"]
    return ours


def _borrows(case: Case) -> bool:
    return bool(case["param_names"]) and not any(step["op"] == "set_params" for step in case["steps"])
