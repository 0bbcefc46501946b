"""MXNet's sgd and lars: rescaled, clipped, decayed gradients, the learning rate inside the velocity."""

from __future__ import annotations

import pytest
import torch
from traces import Case, Tolerance, cases, tensor

from lockstep.optim import MomentumSGD, hooks

GIVEN = ["optimizer", "kwargs", "param_names", "init", "steps.*.lr", "steps.*.grads"]


CASES = cases(
    "mxnet-nnabla/mxnet_optimizers.json",
    num_cases=9,
    given=GIVEN,
    name=lambda content: str(content["optimizer"]),
)


def build(case: Case) -> MomentumSGD:
    """Give each parameter a group, for the original treats it by its name."""
    options = case["kwargs"]
    groups = [{"params": [torch.nn.Parameter(tensor(array))]} for array in case["init"]]
    correction = options.get("momentum_correction", False)
    optimizer = MomentumSGD(groups, momentum=options["momentum"], correction=correction)
    for group, name in enumerate(case["param_names"]):
        if "clip_gradient" in options:
            bound = options["clip_gradient"]
            optimizer.add_hook(hooks.GradientHardClipping(-bound, bound), group=group)
        if not name.endswith("_weight"):
            continue
        if case["optimizer"] == "lars":
            decay = {"weight_decay": options["wd"], "eps": 1e-8}
            optimizer.add_hook(hooks.GradientLARS(threshold=0.0, **decay), group=group)
        else:
            optimizer.add_hook(hooks.WeightDecay(options["wd"]), group=group)
    return optimizer


@pytest.mark.parametrize("case", CASES)
def test_replay(case: Case) -> None:
    if case["optimizer"] not in {"sgd", "lars"}:
        pytest.skip(f"lockstep has no {case['optimizer']} of its own")
    optimizer = build(case)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # What lars multiplies the rates of weights by.
    etas = [
        case["kwargs"].get("eta", 1.0) if name.endswith("_weight") else 1.0 for name in case["param_names"]
    ]
    steps = []
    for step in case["steps"]:
        for group, parameter, grad, eta in zip(
            optimizer.param_groups, parameters, step["grads"], etas, strict=True
        ):
            group["lr"] = step["lr"] * eta
            parameter.grad = tensor(grad) * case["kwargs"].get("rescale_grad", 1.0)
        optimizer.step()
        steps.append({"params_after": [parameter.detach().clone() for parameter in parameters]})
    # The original fuses the lines of an update and so rounds otherwise.
    case.check({"steps": steps}, {"*": Tolerance(1e-5, floor=1e-3)})
