"""MXNet's optimizers: rescaled, clipped, decayed gradients, the learning rate inside the velocity."""

from __future__ import annotations

import pytest
import torch
from mxnet_rules import OURS, optimizer_of, set_rate
from traces import Case, Tolerance, cases, tensor

GIVEN = ["optimizer", "kwargs", "param_names", "init", "steps.*.lr", "steps.*.grads"]

CASES = cases(
    "mxnet-nnabla/mxnet_optimizers.json",
    num_cases=9,
    given=GIVEN,
    name=lambda content: str(content["optimizer"]),
)


@pytest.mark.parametrize("case", CASES)
def test_replay(case: Case) -> None:
    if case["optimizer"] not in OURS:
        case.check({"steps": "no such rule"})
        return
    options = case["kwargs"]
    parameters = [torch.nn.Parameter(tensor(array)) for array in case["init"]]
    optimizer = optimizer_of(case["optimizer"], options, parameters, case["param_names"])
    steps = []
    for step in case["steps"]:
        set_rate(optimizer, step["lr"])
        for parameter, grad in zip(parameters, step["grads"], strict=True):
            parameter.grad = tensor(grad) * options.get("rescale_grad", 1.0)
        optimizer.step()
        steps.append({"params_after": [parameter.detach().clone() for parameter in parameters]})
    # The original fuses the lines of an update and so rounds otherwise, which shows in what is left of larger terms.
    case.check({"steps": steps}, {"*": Tolerance(1e-5, floor=0.0, offset=1e-3, peak=1e-6)})
