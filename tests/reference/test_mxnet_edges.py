"""MXNet's edges: each is refused clearly, or done right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from mxnet_edges import (
    CPUS,
    EDGES,
    FIRST,
    LABEL,
    ONES,
    REFUSED,
    ROWS,
    Mlp,
    N,
    Twice,
    X,
    all_edges,
    outcome,
    parameters,
    told,
)
from mxnet_metrics import metric
from torch import nn
from traces import Case, Tolerance

import lockstep as ls


def group(
    model: nn.Module | None = None, *, devices: int = N.ndev, label: bool = True, **options: Any
) -> ls.ReplicaGroup:
    """Bind the batch on the devices."""
    made = ls.ReplicaGroup(model or Mlp(), ["cpu"] * devices, **options)
    labels = [("softmax_label", (N.batch,))] if label else None
    made.bind(data=[("data", (N.batch, N.din))], labels=labels)
    return made


def ran(model: nn.Module | None = None, **options: Any) -> ls.ReplicaGroup:
    """Run forward and backward once."""
    made = group(model, **options)
    out = made.forward((X, LABEL))
    made.backward(torch.ones_like(out), retain_graph=True)
    return made


def forward_of(size: int, devices: int, loads: list[float] | None = None) -> ls.ReplicaGroup:
    made = ls.ReplicaGroup(Mlp(), ["cpu"] * devices, workloads=loads)
    made.forward(torch.ones(size, N.din))
    return made


def slices(made: ls.ReplicaGroup) -> list[list[int]]:
    return [[run.start, run.stop] for run in made.slices]


def set_partly() -> dict[str, Any]:
    made = group()
    before = ls.digest(made.model)
    refused = outcome(lambda: made.set_parameters(parameters(zzz=torch.ones(1))))
    return {"error": refused, "device_changed_before_error": [ls.digest(made.model) != before] * N.ndev}


def names_and_arrays() -> dict[str, list[int]]:
    found, _ = group().get_parameters()
    return {name: list(found[name].shape) for name in reversed(found)}


def twice(grads: Any) -> Any:
    with ls.ReplicaGroup(Twice(), CPUS, input_grads=True) as made:
        made.forward(ROWS)
        made.backward(grads)
        return made.input_grads()[0]


def same_gradient(second: Callable[[ls.ReplicaGroup], object]) -> bool:
    made = ran()
    first = {name: gradient.clone() for name, gradient in made.gradients().items()}
    second(made)
    return all(torch.allclose(first[name], each, atol=1e-5) for name, each in made.gradients().items())


def backward_again(made: ls.ReplicaGroup, grads: torch.Tensor) -> None:
    made.backward(grads)


def after_evaluation(made: ls.ReplicaGroup) -> None:
    made.forward((X, LABEL), training=False)
    made.backward(ONES)


def nothing_has_a_batch_axis() -> Any:
    with ls.ReplicaGroup(Twice(), CPUS, batch_dim=None) as made:
        return made.forward(torch.ones(4, 2))


def reshaped_to_one() -> dict[str, Any]:
    made = group(label=False)
    made.reshape(data=[("data", (1, N.din))])
    made.forward(torch.ones(1, N.din))
    return {"batch_size_after": made.batch_size, "slices_after": slices(made), "data_shape_after": [1, N.din]}


def reshaped_features() -> None:
    made = group(label=False)
    made.reshape(data=[("data", (N.batch, N.din + 4))])
    made.forward(torch.ones(N.batch, N.din + 4))


def reshaped_to_the_same() -> dict[str, Any]:
    made = ran()
    done = made.reshape(data=[("data", (N.batch, N.din))], labels=[("softmax_label", (N.batch,))])
    kept = made.outputs(merge=False)[0]
    assert sum(len(part) for part in kept) == N.batch
    return {"rebuilt": done, "data_axes": [0]}


def sharing() -> dict[str, bool]:
    first = ran()
    before = ls.digest(first.outputs())
    with group(shared_group=first) as second:
        second.forward((X + 1, LABEL))
    return {"outputs_of_first_group_survive": ls.digest(first.outputs()) == before}


def sharing_with_more_devices() -> bool:
    first = ran()
    with group(devices=N.ndev + 1, shared_group=first) as second:
        return torch.allclose(second.forward((X, LABEL)), first.outputs()[0])


def sharing_other_shapes() -> None:
    ls.ReplicaGroup(nn.Linear(9, 4), ["cpu"], shared_group=ls.ReplicaGroup(nn.Linear(5, 4), ["cpu"]))


class Recurrent(nn.Module):
    def forward(self, data: torch.Tensor, s0: torch.Tensor) -> torch.Tensor:
        return torch.tanh(data + s0)


def recurrent(*states: torch.Tensor) -> list[int]:
    with ls.ReplicaGroup(Recurrent(), CPUS) as made:
        made.bind(data=[("data", X.shape), ("s0", X.shape)])
        return list(made.forward((X, *states)).shape)


def measured(labels: Any, *, per_device: bool = True) -> dict[str, Any]:
    """Update an accuracy with the samples that a metric is told of."""
    accuracy = metric("acc", None, N.dout)
    with ls.ReplicaGroup(nn.Identity(), ["cpu"] * len(N.mloads), workloads=N.mloads) as made:
        made.forward(torch.rand(N.mbatch, N.dout))
        error = outcome(lambda: made.update_metric(accuracy, labels, per_device=per_device))
    return {"error": error, "num_inst": accuracy.record()["num_inst"]}


class Chosen:
    """A metric of one output and one label by name."""

    def __init__(self, output: str, label: str) -> None:
        self.output, self.label = output, label
        self.accuracy = metric("acc", None, N.dout)

    def update(self, output: Any, target: Any) -> None:
        self.accuracy.update(output[self.output], target[self.label])


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"softmax_output": x}


def measured_by_name(output: str, label: str) -> dict[str, Any]:
    chosen = Chosen(output, label)
    with ls.ReplicaGroup(Named(), ["cpu"] * len(N.mloads)) as made:
        made.forward(torch.rand(N.mbatch, N.dout))
        error = outcome(lambda: made.update_metric(chosen, {"softmax_label": MEASURED}))
    return {"error": error, "num_inst": chosen.accuracy.record()["num_inst"]}


def left_alone() -> str:
    target = {"zzz": torch.ones(1)}
    target.update(group().get_parameters()[0])
    assert target["zzz"].tolist() == [1.0]
    return "extra targets are left alone"


def updater(**options: Any) -> None:
    ls.ParallelUpdater([X], **options)


def rows_and_slices(made: ls.ReplicaGroup) -> dict[str, Any]:
    return {"outputs_rows": len(made.outputs()[0]), "slices": slices(made)}


def uninitialised() -> None:
    with ls.ReplicaGroup(nn.LazyLinear(3), CPUS) as made:
        made.forward(X)


def rows_after_reshaping() -> int:
    """Say how many samples a module was called with that was bound with others."""
    found = [case for case in all_edges() if case["case"] == "module_forward_other_batch_size_reshapes"]
    return next((case["value"]["outputs_rows"] for case in found), N.batch + 3)


MORE = torch.ones(N.batch + 1, N.din), torch.zeros(N.batch + 1)
FEWER = torch.ones(N.batch - 1, N.din), torch.zeros(N.batch - 1)
MEASURED = torch.zeros(N.mbatch)
CALLS: dict[str, Callable[[], Any]] = {
    "backward_before_forward": lambda: group().backward(ONES),
    "backward_not_for_training": lambda: ran(training=False),
    "get_input_grads_without_inputs_need_grad": lambda: ran().input_grads(),
    "for_training_false_has_no_grad_arrays": lambda: {
        "grad_arrays": None if set(group(training=False).gradients().values()) == {None} else "some"
    },
    "inputs_need_grad_without_training_unmerged": lambda: group(training=False, input_grads=True),
    "inputs_need_grad_without_training_merged": lambda: group(training=False, input_grads=True),
    "label_batch_differs_from_data_batch": lambda: ls.ReplicaGroup(Mlp(), CPUS).bind(
        data=[("data", X.shape)], labels=[("softmax_label", (N.batch - 1,))]
    ),
    "more_devices_than_samples": lambda: slices(forward_of(N.many - 1, N.many)),
    "three_samples_per_two_devices": lambda: slices(forward_of(N.many * 3 // 2, N.many)),
    "empty_data_shapes": lambda: ls.ReplicaGroup(Mlp(), CPUS).bind(data=[]),
    "unknown_label_name": lambda: ls.ReplicaGroup(Mlp(), ["cpu"]).forward({"data": X, "nope": LABEL}),
    "bound_without_label_forward": lambda: [list(group(label=False).forward(X).shape)],
    "bound_without_label_update_metric": lambda: ran().update_metric(metric("acc", None, N.dout), None),
    "bound_with_label_forward_without_label_in_training": lambda: group(Mlp(needs_label=True)).forward(X),
    "forward_with_larger_batch_than_bound": lambda: group().forward(MORE),
    "forward_with_smaller_batch_than_bound": lambda: group().forward(FEWER),
    "set_params_extra_not_allowed": set_partly,
    "set_params_extra_allowed": lambda: group().set_parameters(parameters(zzz=torch.ones(1)), allow_extra=True),
    "set_params_extra_aux_not_allowed": lambda: group().set_parameters(parameters(), {"m": torch.ones(1)}),
    "set_params_missing_is_silent": lambda: group().set_parameters({"fc1_bias": torch.ones(N.dh)}),
    "set_params_aux_none": lambda: group().set_parameters(parameters(), None),
    "set_params_wrong_shape": lambda: group().set_parameters(parameters(fc1_bias=torch.ones(N.dh + 1))),
    "set_params_accepts_input_names": lambda: group().set_parameters(parameters(data=X)),
    "get_params_missing_target": lambda: list(group().get_parameters()[0]),
    "get_params_extra_target": left_alone,
    "get_params_with_param_names_not_in_argument_order": names_and_arrays,
    "backward_without_out_grads_on_non_loss": lambda: twice(None),
    "backward_with_bare_array_instead_of_list": lambda: twice(ROWS),
    "backward_out_grads_too_short": lambda: twice([ROWS[1:]]),
    "backward_out_grads_too_long_surplus_ignored": lambda: twice([torch.cat([ROWS, ROWS])]),
    "backward_more_out_grads_than_outputs": lambda: twice([ROWS] * 2),
    "loss_output_ignores_out_grads": lambda: {
        "same_as_without_out_grads": same_gradient(lambda made: backward_again(made, 7 * ONES))
    },
    "backward_twice_write": lambda: {"same_gradient": same_gradient(lambda made: backward_again(made, ONES))},
    "backward_after_forward_is_train_false": lambda: {"same_gradient_to_1e-5": same_gradient(after_evaluation)},
    "grad_req_list_wrong_length": lambda: group(grad_mode=["write"]),
    "grad_req_bad_type": lambda: group(grad_mode=5),
    "grad_req_unknown_string": lambda: group(grad_mode="foo"),
    "no_input_has_a_batch_axis": nothing_has_a_batch_axis,
    "reshape_to_fewer_samples_than_devices": reshaped_to_one,
    "reshape_feature_dimension_changes_a_parameter_shape": reshaped_features,
    "reshape_same_shape_other_layout_is_ignored": reshaped_to_the_same,
    "bind_exec_twice_without_reshape": lambda: group().bind(data=[("data", X.shape)]),
    "shared_group_shares_activation_memory": sharing,
    "shared_group_more_contexts_than_shared": sharing_with_more_devices,
    "shared_group_parameter_shape_differs": sharing_other_shapes,
    "get_states_merged": lambda: recurrent(torch.zeros_like(X)),
    "set_states_nothing": recurrent,
    "set_states_both": lambda: recurrent(torch.zeros_like(X), torch.zeros_like(X)),
    "update_metric_labels_too_short": lambda: measured(MEASURED[:-1]),
    "update_metric_labels_too_long": lambda: measured(torch.zeros(N.mbatch + 2)),
    "update_metric_pre_sliced": lambda: measured(torch.cat([MEASURED[:2], MEASURED[2:]])),
    "update_metric_pre_sliced_given_flat_labels": lambda: measured([MEASURED[:2], MEASURED[2:]]),
    "update_metric_unknown_output_name": lambda: measured_by_name("nope", "softmax_label"),
    "update_metric_unknown_label_name": lambda: measured_by_name("softmax_output", "nope"),
    "update_metric_pre_sliced_is_mandatory_on_the_group": lambda: measured(MEASURED, per_device=False)["num_inst"],
    "get_outputs_out_of_range": lambda: ran().outputs()[5:7],
    "metric_get_before_update": lambda: [metric("acc", None, N.dout).record()[key] for key in ("name", "value")],
    "top_k_1_refused": lambda: ls.metrics.Accuracy(top_k=1).top_k,
    "monitor_toc_without_tic": lambda: ls.Monitor().toc(),
    "more_work_loads_than_contexts": lambda: group(workloads=[1] * (N.ndev + 1)),
    "fewer_work_loads_than_contexts": lambda: group(workloads=[1] * (N.ndev - 1)),
    "forward_list_of_batches_one_per_device": lambda: group(label=False).forward([X[:1]] * N.ndev),
    "empty_layout_string_means_no_batch_axis": lambda: group(batch_dim=""),
    "module_work_load_list_wrong_length": lambda: group(workloads=range(1, N.ndev + 2)),
    "module_backward_before_bind": lambda: ls.ReplicaGroup(Mlp(), CPUS).backward(),
    "module_forward_before_init_params": uninitialised,
    "module_update_before_init_optimizer": lambda: updater(optimizer=None, model=Mlp()),
    "module_inputs_need_grad_requires_for_training": lambda: group(training=False, input_grads=True),
    "module_unknown_data_name": lambda: ls.ReplicaGroup(Mlp(), CPUS).forward({"nope": X}),
    "module_set_params_missing": lambda: group().set_parameters({"fc1_bias": torch.ones(N.dh)}),
    "module_set_params_missing_allowed": lambda: group().set_parameters(
        {"fc1_bias": torch.ones(N.dh)}, allow_missing=True
    ),
    "module_set_params_extra": lambda: group().set_parameters(
        {"fc1_bias": torch.ones(N.dh), "zz": torch.ones(1)}, allow_missing=True
    ),
    "module_set_params_extra_silently_accepted_when_nothing_is_missing": lambda: group().set_parameters(
        parameters(zz=torch.ones(1))
    ),
    "module_forward_other_batch_size_reshapes": lambda: rows_and_slices(forward_of(rows_after_reshaping(), N.ndev)),
    "module_forward_one_sample_on_several_devices": lambda: slices(forward_of(1, N.ndev)),
}


def without_errors(value: Any) -> Any:
    """Keep of an error that there is one: kinds of failure have other names here."""
    if isinstance(value, dict):
        return REFUSED if value.keys() == {"type", "message"} else {k: without_errors(v) for k, v in value.items()}
    return value


def check(case: Case, calls: Mapping[str, Callable[[], Any]]) -> None:
    """Compare what a call comes to."""
    refused = case["outcome"] == "error"
    result = REFUSED if refused else without_errors(case["value"])
    ours = (outcome if refused else told)(calls[case["case"]])
    content = {"case": case["case"], "note": case["note"], "result": result}
    replace(case, content=content).check({"result": ours}, {"*": Tolerance(1e-6)})


@pytest.mark.parametrize("case", EDGES)
def test_edges(case: Case) -> None:
    check(case, CALLS)


def test_every_edge_is_tried() -> None:
    names = {case["case"] for case in all_edges()}
    assert names <= CALLS.keys()
    is_public = FIRST is not None and FIRST.shared["origin"]["variant"] == "dev"
    assert not is_public or names == CALLS.keys()
