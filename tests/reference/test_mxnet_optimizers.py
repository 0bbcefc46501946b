"""MXNet's sgd: rescaled, clipped and decayed gradients, the learning rate inside the velocity."""

from __future__ import annotations

import pytest
import torch
from traces import Case, Tolerance, cases, tensor

from lockstep.optim import MomentumSGD, hooks

GIVEN = ["optimizer", "kwargs", "param_names", "init", "steps.*.lr", "steps.*.grads"]


@pytest.mark.parametrize(
    "case",
    cases(
        "mxnet-nnabla/mxnet_optimizers.json",
        num_cases=9,
        given=GIVEN,
        name=lambda content: str(content["optimizer"]),
    ),
)
def test_replay(case: Case) -> None:
    if case["optimizer"] != "sgd":
        pytest.skip(f"lockstep has no {case['optimizer']} of its own")
    options = case["kwargs"]
    parameters = [torch.nn.Parameter(tensor(array)) for array in case["init"]]
    optimizer = MomentumSGD(
        [{"params": [parameter]} for parameter in parameters],
        lr=options["learning_rate"],
        momentum=options["momentum"],
    )
    if "clip_gradient" in options:
        bound = options["clip_gradient"]
        optimizer.add_hook(hooks.GradientHardClipping(-bound, bound))
    for group, name in enumerate(case["param_names"]):
        # The original decays by name.
        if name.endswith("_weight"):
            optimizer.add_hook(hooks.WeightDecay(options["wd"]), group=group)
    steps = []
    for step in case["steps"]:
        for group, parameter, grad in zip(optimizer.param_groups, parameters, step["grads"], strict=True):
            group["lr"] = step["lr"]
            parameter.grad = tensor(grad) * options.get("rescale_grad", 1.0)
        optimizer.step()
        steps.append({"params_after": [parameter.detach().clone() for parameter in parameters]})
    # The original fuses the lines of an update and so rounds otherwise.
    case.check({"steps": steps}, {"*": Tolerance(1e-5, floor=1e-3)})
