"""Chainer's loss scaling and float32 update, through the optimizers' own faces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_optimizers import CLASSES, Classes
from torch import nn
from traces import Case, Tolerance, cases, columns, tensor

from lockstep.optim import HookedOptimizer, hooks
from lockstep.precision import first_nonfinite

GIVEN = [
    "status",
    "optimizer",
    "lr",
    "momentum",
    "dtype",
    "fp32_update",
    "hooks",
    "init_w",
    "init_u",
    "grad_w_unscaled",
    "grad_u_unscaled",
    "mode",
    "interval",
    "scale",
    "sequence",
    "steps.step",
]
# As the traces' description suggests, for what is held in each format.
TOLERANCES = {"float64": Tolerance(1e-10), "float32": Tolerance(1e-5), "float16": Tolerance(2e-3)}


def build(parameters: dict[str, nn.Parameter], case: Case, classes: Classes) -> HookedOptimizer:
    """Give every parameter a group of its own, as Chainer gives each a rule of its own."""
    groups = [{"params": [parameter]} for parameter in parameters.values()]
    rates = {"lr": case["lr"], "momentum": case["momentum"]}
    optimizer = classes[case["optimizer"]](groups, **rates, missing_grad="zero")
    for entry in case["hooks"]:
        group = None if entry["on"] == "optimizer" else list(parameters).index(entry["on"])
        optimizer.add_hook(getattr(hooks, entry["hook"])(*entry["args"]), timing=entry["timing"], group=group)
    return optimizer


def velocity(optimizer: HookedOptimizer, parameter: nn.Parameter) -> torch.Tensor | None:
    """Chainer's velocity has the other sign."""
    state = optimizer.state.get(parameter)
    return None if state is None else -state["velocity"]


def turn_on(optimizer: HookedOptimizer, case: Case, *, by_setting: bool) -> None:
    """Configure the loss scaling of a case; a static scale may be set in either of two ways."""
    if case["mode"] in {"dynamic", "dynamic_then_static"}:
        interval = case.content.get("interval")
        optimizer.loss_scaling(**({} if interval is None else {"interval": interval}))
    if case["mode"] == "dynamic_then_static" or (case["mode"] == "static" and by_setting):
        optimizer.set_loss_scale(case["scale"])
    elif case["mode"] == "static":
        optimizer.loss_scaling(scale=case["scale"])


def replay_loss_scaling(case: Case, classes: Classes, *, by_setting: bool = False) -> None:
    dtype = getattr(torch, case["dtype"])
    parameters = {name: nn.Parameter(tensor(case[f"init_{name}"])) for name in ("w", "u")}
    optimizer = build(parameters, case, classes)
    optimizer.use_fp32_update(case["fp32_update"])
    turn_on(optimizer, case, by_setting=by_setting)

    def loss_of(number: int) -> torch.Tensor:
        return sum(
            (parameter * tensor(case[f"grad_{name}_unscaled"][number], dtype).reshape(parameter.shape)).sum()
            for name, parameter in parameters.items()
        )

    steps: list[dict[str, Any]] = []
    for number in range(len(case["steps"])):
        before = parameters["w"].detach().clone()
        scale, t = optimizer.loss_scale, optimizer.t
        optimizer.update(loss_of, number)
        updated = optimizer.t > t
        bad = [name for name, each in parameters.items() if first_nonfinite({name: each.grad})]
        record: dict[str, Any] = {
            "scale_before": None if scale is None else scale.factor,
            "scale_after": None if scale is None else optimizer.loss_scale.factor,
            "nonfinite_params_reported": 0 if updated else len(bad),
            "rules_updated": updated,
            "param_changed": not torch.equal(before, parameters["w"]),
            "t": optimizer.t,
            "rule_t": optimizer.t,
            **{name: parameter.detach() for name, parameter in parameters.items()},
            **{f"v_{name}": velocity(optimizer, parameter) for name, parameter in parameters.items()},
        }
        if case["fp32_update"]:
            for name, parameter in parameters.items():
                record[f"master_{name}"] = optimizer.masters.of(parameter)
        steps.append(copy.deepcopy(record))
    tolerances = {"steps.scale_*": Tolerance(1e-12), "steps.master_*": TOLERANCES["float32"]}
    ours = {"steps": columns(steps)}
    case.in_columns().check(ours, {**tolerances, "*": TOLERANCES[case["dtype"]]})


FP32_GIVEN = [
    "status",
    "optimizer",
    "lr",
    "momentum",
    "fp32_update",
    "enabled",
    "loss_scale",
    "hooks",
    "overwrite_h_with_ones_before_step",
    "steps.step",
]


def replay_fp32_update(case: Case, classes: Classes) -> None:
    parameters = {name: nn.Parameter(tensor(case.shared[f"init_{name}"])) for name in ("h", "f")}
    h, f = parameters.values()
    optimizer = build(parameters, case, classes)
    optimizer.use_fp32_update(case["fp32_update"])
    if case["loss_scale"] is not None:
        optimizer.set_loss_scale(case["loss_scale"])
    steps = []
    for number, original in enumerate(case["steps"]):
        if number == case["overwrite_h_with_ones_before_step"]:
            h.data.fill_(1.0)
        for name, parameter in parameters.items():
            given: Sequence[float] = case.shared[f"grad_{name}"][number]
            grad = tensor(given, torch.float32) * (case["loss_scale"] or 1.0)
            parameter.grad = grad.reshape(parameter.shape).to(parameter.dtype)
        optimizer.update()
        masters = optimizer.masters
        record: dict[str, Any] = {
            "h": h.detach(),
            "h_dtype": str(h.dtype).removeprefix("torch."),
            "master_h": None if masters is None else masters.of(h),
            "v_h": velocity(optimizer, h),
            "v_h_dtype": str(optimizer.state[h]["velocity"].dtype).removeprefix("torch."),
            "f": f.detach(),
            "v_f": velocity(optimizer, f),
            "f_has_master": masters is not None and 1 in masters.saved_masters(),
        }
        for name, parameter in parameters.items():
            recorded = original[f"grad_{name}_after_update"] is not None
            record[f"grad_{name}_after_update"] = parameter.grad if recorded else None
        steps.append(copy.deepcopy(record))
    half = TOLERANCES["float16"]
    # Chainer decays by a hook of the optimizer in float16, on gradients that are still scaled.
    decayed = any(entry["on"] == "optimizer" for entry in case["hooks"])
    wide = TOLERANCES["float32"] if case["fp32_update"] and not decayed else half
    ours = {"steps": columns(steps)}
    case.in_columns().check(ours, {"steps.h.*": half, "steps.grad_h*": half, "*": wide})


@pytest.mark.parametrize("case", cases("chainer-cunn/loss_scaling.json", num_cases=30, given=GIVEN))
@pytest.mark.parametrize("by_setting", [False, True])
def test_loss_scaling(case: Case, *, by_setting: bool) -> None:
    replay_loss_scaling(case, CLASSES, by_setting=by_setting)


@pytest.mark.parametrize("case", cases("chainer-cunn/fp32_update.json", num_cases=13, given=FP32_GIVEN))
def test_fp32_update(case: Case) -> None:
    replay_fp32_update(case, CLASSES)
