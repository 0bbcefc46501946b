"""Chainer's momentum optimizers: the same weights, velocities and counts, hooks or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from traces import Case, Tolerance, cases, tensor

from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, hooks

Classes = Mapping[str, Callable[..., HookedOptimizer]]

CLASSES: Classes = {
    "MomentumSGD": MomentumSGD,
    "CorrectedMomentumSGD": CorrectedMomentumSGD,
}
GIVEN = [
    "status",
    "optimizer",
    "dtype",
    "hooks",
    "param_overrides",
    "disabled_params",
    "grads_from",
    "init_from",
    "steps.*.step",
    "steps.*.lr",
    "steps.*.momentum",
    "steps.*.missing_grad",
]
# As the traces' description suggests: the original adds in another order.
TOLERANCES = {"float32": Tolerance(1e-5), "float64": Tolerance(1e-10)}


def build(case: Case, classes: Classes) -> tuple[HookedOptimizer, dict[str, torch.nn.Parameter]]:
    """Give every parameter a group of its own, as Chainer gives each a rule of its own."""
    parameters = {name: torch.nn.Parameter(tensor(array)) for name, array in case.shared[case["init_from"]].items()}
    groups = [
        {"params": [parameter], "frozen": name in case["disabled_params"]} for name, parameter in parameters.items()
    ]
    optimizer = classes[case["optimizer"]](groups, missing_grad="zero")
    names = list(parameters)
    for entry in case["hooks"]:
        group = None if entry["on"] == "optimizer" else names.index(entry["on"])
        optimizer.add_hook(getattr(hooks, entry["hook"])(*entry["args"]), timing=entry["timing"], group=group)
    return optimizer, parameters


def prepare(optimizer: HookedOptimizer, names: list[str], case: Case, number: int) -> None:
    """Set the rates and gradients of one step."""
    step = case["steps"][number]
    for index, (name, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        shared = {"lr": step["lr"], "momentum": step["momentum"]}
        group.update({**shared, **case["param_overrides"].get(name, {})})
        (parameter,) = group["params"]
        grad = tensor(case.shared["grads_float32"][number][index], parameter.dtype).reshape(parameter.shape)
        parameter.grad = None if name in step.get("missing_grad", []) else grad


def results(
    optimizer: HookedOptimizer, parameters: dict[str, torch.nn.Parameter], original: dict[str, Any]
) -> dict[str, Any]:
    """Record what a step made; Chainer's velocity has the other sign."""
    moved = {name: parameter in optimizer.state for name, parameter in parameters.items()}
    record: dict[str, Any] = {
        "t": optimizer.t,
        "param": parameters,
        "v": {
            name: -optimizer.state[parameter]["velocity"] if moved[name] else None
            for name, parameter in parameters.items()
        },
        # A parameter moves in every update, or in none where it is frozen.
        "rule_t": {name: optimizer.t if moved[name] else 0 for name in parameters},
    }
    if "grad_after_hooks" in original:
        record["grad_after_hooks"] = {name: parameter.grad for name, parameter in parameters.items()}
    return record


def replay(case: Case, classes: Classes) -> None:
    optimizer, parameters = build(case, classes)
    steps = []
    for number, original in enumerate(case["steps"]):
        prepare(optimizer, list(parameters), case, number)
        optimizer.step()
        steps.append(copy.deepcopy(results(optimizer, parameters, original)))
    case.check({"steps": steps}, {"*": TOLERANCES[case["dtype"]]})


@pytest.mark.parametrize("case", cases("chainer-cunn/optimizers.json", num_cases=30, given=GIVEN))
def test_replay(case: Case) -> None:
    replay(case, CLASSES)
