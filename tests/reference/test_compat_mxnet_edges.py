"""MXNet's edges once more: what its own names refuse, and what they do right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_mxnet_edges as core
import torch
from mxnet_edges import LABEL, ONES, ROWS, SHAPES, Mlp, N, Twice, X, outcome, parameters, told
from mxnet_metrics import metric
from torch import nn
from traces import Case, cases

import lockstep as ls
from lockstep.compat.mxnet import DataBatch, DataDesc, DataParallelExecutorGroup

DATA, LABELS = [DataDesc("data", X.shape)], [DataDesc("softmax_label", LABEL.shape)]
BATCH = DataBatch([X], [LABEL])


def group(
    model: nn.Module | None = None,
    *,
    devices: int = N.ndev,
    loads: Any = None,
    data: Any = DATA,
    labels: Any = LABELS,
    training: bool = True,
    input_grads: bool = False,
    **options: Any,
) -> DataParallelExecutorGroup:
    """Bind the batch on the devices."""
    return DataParallelExecutorGroup(
        model or Mlp(), ["cpu"] * devices, loads, data, labels, None, training, input_grads, **options
    )


def ran(**options: Any) -> DataParallelExecutorGroup:
    """Run forward and backward once."""
    made = group(**options)
    made.forward(BATCH)
    made.backward(ONES)
    return made


def slices(made: DataParallelExecutorGroup) -> list[list[int]]:
    return [[run.start, run.stop] for run in made.core.slices]


def of_samples(size: int, devices: int) -> list[list[int]]:
    return slices(group(devices=devices, data=[DataDesc("data", (size, N.din))], labels=None))


def set_partly() -> dict[str, Any]:
    made = group()
    before = ls.digest(made.core.model)
    refused = outcome(lambda: made.set_params(parameters(zzz=torch.ones(1)), None))
    changed = ls.digest(made.core.model) != before
    return {"error": refused, "device_changed_before_error": [changed] * N.ndev}


def targets(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(SHAPES.get(name, ())) for name in names}


def left_alone() -> str:
    given = targets(*SHAPES, "zzz")
    group().get_params(given, {})
    assert given["zzz"] == 0
    assert given["fc1_weight"].any()
    return "extra targets are left alone"


def in_other_order() -> dict[str, list[int]]:
    given = targets(*reversed(SHAPES))
    group().get_params(given, {})
    return {name: list(each.shape) for name, each in given.items()}


def twice(grads: Any) -> Any:
    made = group(Twice(), data=[DataDesc("x", ROWS.shape)], labels=None, input_grads=True)
    with made.core:
        made.forward(DataBatch([ROWS]))
        made.backward(grads)
        return made.get_input_grads_merged()[0]


def same_gradient(second: Callable[[DataParallelExecutorGroup], object]) -> bool:
    made = ran()
    first = {name: gradient.clone() for name, gradient in made.core.gradients().items()}
    second(made)
    return all(torch.allclose(first[name], each, atol=1e-5) for name, each in made.core.gradients().items())


def after_evaluation(made: DataParallelExecutorGroup) -> None:
    made.forward(BATCH, is_train=False)
    made.backward(ONES)


def reshaped_to_one() -> dict[str, Any]:
    made = group()
    error = outcome(lambda: made.reshape([DataDesc("data", (1, N.din))], [DataDesc("softmax_label", (1,))]))
    made.forward(BATCH)
    return {
        "error": error,
        "batch_size_after": made.get_batch_size(),
        "slices_after": slices(made),
        "data_shape_after": list(X.shape),
    }


def reshaped_features() -> None:
    made = group(labels=None)
    made.reshape([DataDesc("data", (N.batch, N.din + 4))], None)
    made.forward(DataBatch([torch.ones(N.batch, N.din + 4)]))


def reshaped_to_another_layout() -> dict[str, Any]:
    made = ran()
    desc = DataDesc("data", X.shape, layout="NT")
    made.reshape([desc], LABELS)
    return {"rebuilt": len(made.get_outputs_merged()[0]) != N.batch, "data_axes": [desc.batch_axis]}


def sharing() -> dict[str, bool]:
    first = ran()
    before = ls.digest(first.get_outputs_merged())
    second = group(shared_group=first)
    with second.core:
        second.forward(DataBatch([X + 1], [LABEL]))
    return {"outputs_of_first_group_survive": ls.digest(first.get_outputs_merged()) == before}


def sharing_with_more_devices() -> bool:
    first = ran()
    second = group(devices=N.ndev + 1, shared_group=first)
    with second.core:
        second.forward(BATCH)
        return torch.allclose(second.get_outputs_merged()[0], first.get_outputs_merged()[0])


def sharing_other_shapes() -> None:
    first = group(nn.Linear(N.din, 4), labels=None)
    group(nn.Linear(9, 4), labels=None, data=[DataDesc("data", (N.batch, 9))], shared_group=first)


def measured(labels: torch.Tensor) -> dict[str, Any]:
    """Update an accuracy with the samples that a metric is told of."""
    accuracy = metric("acc", None, N.dout)
    told_of = torch.rand(N.mbatch, N.dout)
    data = [DataDesc("data", told_of.shape)]
    made = group(nn.Identity(), devices=len(N.mloads), loads=N.mloads, data=data, labels=None)
    with made.core:
        made.forward(DataBatch([told_of]))
        error = outcome(lambda: made.update_metric(accuracy, [labels]))
    return {"error": error, "num_inst": accuracy.record()["num_inst"]}


def one_batch_a_device() -> dict[str, bool]:
    made = ran()
    whole = made.get_outputs_merged()[0].clone()
    made.forward([DataBatch([X[run]], [LABEL[run]]) for run in made.core.slices])
    return {"same_as_concatenated_batch": torch.equal(made.get_outputs_merged()[0], whole)}


def without_layout() -> dict[str, Any]:
    desc = DataDesc("data", X.shape, layout="")
    return {
        "data_axes": [DataDesc.get_batch_axis(desc.layout)],
        "slices": told(lambda: slices(group(data=[desc], labels=None))),
    }


CALLS: dict[str, Callable[[], Any]] = {
    "backward_before_forward": lambda: group().backward([ONES]),
    "backward_not_for_training": lambda: ran(training=False),
    "get_input_grads_without_inputs_need_grad": lambda: ran().get_input_grads(),
    "inputs_need_grad_without_training_unmerged": lambda: group(training=False, input_grads=True),
    "inputs_need_grad_without_training_merged": lambda: group(training=False, input_grads=True),
    "label_batch_differs_from_data_batch": lambda: group(labels=[DataDesc("softmax_label", (N.batch - 1,))]),
    "more_devices_than_samples": lambda: of_samples(N.many - 1, N.many),
    "three_samples_per_two_devices": lambda: of_samples(N.many * 3 // 2, N.many),
    "empty_data_shapes": lambda: group(data=[]),
    "bound_without_label_update_metric": lambda: ran().update_metric(metric("acc", None, N.dout), None),
    "bound_with_label_forward_without_label_in_training": lambda: group(Mlp(needs_label=True)).forward(DataBatch([X])),
    "forward_with_larger_batch_than_bound": lambda: group().forward(DataBatch([torch.ones(N.batch + 1, N.din)])),
    "forward_with_smaller_batch_than_bound": lambda: group().forward(DataBatch([torch.ones(N.batch - 1, N.din)])),
    "set_params_extra_not_allowed": set_partly,
    "set_params_extra_allowed": lambda: group().set_params(parameters(zzz=torch.ones(1)), None, True),
    "set_params_extra_aux_not_allowed": lambda: group().set_params(parameters(), {"m": torch.ones(1)}),
    "set_params_missing_is_silent": lambda: group().set_params({"fc1_bias": torch.ones(N.dh)}, {}),
    "set_params_aux_none": lambda: group().set_params(parameters(), None),
    "set_params_wrong_shape": lambda: group().set_params(parameters(fc1_bias=torch.ones(N.dh + 1)), None),
    "set_params_accepts_input_names": lambda: group().set_params(parameters(data=X), None),
    "get_params_missing_target": lambda: group().get_params({}, {}),
    "get_params_extra_target": left_alone,
    "get_params_with_param_names_not_in_argument_order": in_other_order,
    "backward_without_out_grads_on_non_loss": lambda: twice(None),
    "backward_with_bare_array_instead_of_list": lambda: twice(ROWS),
    "backward_out_grads_too_short": lambda: twice([ROWS[1:]]),
    "backward_out_grads_too_long_surplus_ignored": lambda: twice([torch.cat([ROWS, ROWS])]),
    "backward_more_out_grads_than_outputs": lambda: twice([ROWS] * 2),
    "loss_output_ignores_out_grads": lambda: {
        "same_as_without_out_grads": same_gradient(lambda made: made.backward(7 * ONES))
    },
    "backward_twice_write": lambda: {"same_gradient": same_gradient(lambda made: made.backward(ONES))},
    "backward_after_forward_is_train_false": lambda: {"same_gradient_to_1e-5": same_gradient(after_evaluation)},
    "grad_req_list_wrong_length": lambda: group(grad_req=["write"]),
    "grad_req_bad_type": lambda: group(grad_req=5),
    "grad_req_unknown_string": lambda: group(grad_req="foo"),
    "no_input_has_a_batch_axis": lambda: group(Twice(), data=[DataDesc("x", (4, 2), layout="TC")], labels=None),
    "reshape_to_fewer_samples_than_devices": reshaped_to_one,
    "reshape_feature_dimension_changes_a_parameter_shape": reshaped_features,
    "reshape_same_shape_other_layout_is_ignored": reshaped_to_another_layout,
    "bind_exec_twice_without_reshape": lambda: group().bind_exec(DATA, LABELS, None),
    "shared_group_shares_activation_memory": sharing,
    "shared_group_more_contexts_than_shared": sharing_with_more_devices,
    "shared_group_parameter_shape_differs": sharing_other_shapes,
    "update_metric_labels_too_short": lambda: measured(torch.zeros(N.mbatch - 1)),
    "update_metric_labels_too_long": lambda: measured(torch.zeros(N.mbatch + 2)),
    "update_metric_pre_sliced_is_mandatory_on_the_group": lambda: measured(torch.zeros(N.mbatch))["num_inst"],
    "more_work_loads_than_contexts": lambda: group(loads=[1] * (N.ndev + 1)),
    "fewer_work_loads_than_contexts": lambda: group(loads=[1] * (N.ndev - 1)),
    "forward_list_of_batches_one_per_device": one_batch_a_device,
    "empty_layout_string_means_no_batch_axis": without_layout,
}
"""Those that are about the group; the others are about parts that are the core's own."""


@pytest.mark.parametrize(
    "case",
    cases(
        "mxnet-nnabla/mxnet_edges.json",
        num_cases=75,
        given=["note", "case"],
        name=lambda content: content["case"],
        through="compat",
    ),
)
def test_edges(case: Case) -> None:
    core.check(case, {**core.CALLS, **CALLS})


def test_all_are_edges_of_the_original() -> None:
    assert CALLS.keys() <= core.CALLS.keys()
