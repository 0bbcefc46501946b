"""NNabla's Sgd and Momentum: rates, decay, clipping, and gradients that were never written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from traces import Case, Tolerance, cases, equal, tensor

from lockstep.optim import MomentumSGD, hooks

GIVEN = ["solver", "args", "mode", "weight_decay_is_fused", "params_init", "steps.*.grads", "steps.*.calls"]
# The traces' description: parameters after training, of |value| + 1e-3.
CLOSE = {"*": Tolerance(1e-5, floor=1e-3)}


def apply(optimizer: MomentumSGD, call: list[Any]) -> None:
    """Do one call of a step."""
    match call:
        case ["update"]:
            optimizer.step()
        case ["set_learning_rate", lr]:
            for group in optimizer.param_groups:
                group["lr"] = lr
        case ["weight_decay", rate]:
            hooks.WeightDecay(rate)(optimizer)
        case ["clip_grad_by_norm", 0.0]:
            pass  # The original takes 0 for no clipping; here one leaves the hook away.
        case ["clip_grad_by_norm", limit]:
            # The original clips each parameter by its own norm.
            for group in optimizer.param_groups:
                hooks.GradientClipping(limit)(optimizer.part([group]))
        case _:
            raise AssertionError(call)


SOLVERS = cases(
    "mxnet-nnabla/nnabla_solvers.json",
    num_cases=40,
    given=GIVEN,
    key="solvers",
    name=lambda content: f"{content['solver']}/{content['mode']}",
)


@pytest.mark.parametrize("case", SOLVERS)
def test_replay(case: Case) -> None:
    if case["solver"] not in {"Sgd", "Momentum"}:
        pytest.skip(f"lockstep has no {case['solver']} of its own")
    parameters = {name: torch.nn.Parameter(tensor(array)) for name, array in case["params_init"].items()}
    lr, momentum = [*case["args"], 0.0][:2]
    groups = [{"params": [parameter]} for parameter in parameters.values()]
    optimizer = MomentumSGD(groups, lr=lr, momentum=momentum)
    steps = []
    for step in case["steps"]:
        for name, grad in step["grads"].items():
            parameters[name].grad = None if grad is None else tensor(grad)
        for call in step["calls"]:
            apply(optimizer, call)
        steps.append(
            {
                "params_after": {name: each.detach().clone() for name, each in parameters.items()},
                "t_after": dict.fromkeys(parameters, optimizer.t),
                "state_after": {
                    name: {"m": optimizer.state[each]["velocity"].clone()}
                    if momentum and each in optimizer.state
                    else {}
                    for name, each in parameters.items()
                },
                "lr_after": optimizer.lr,
            }
        )
    case.check({"steps": steps}, CLOSE)


@pytest.mark.parametrize("case", SOLVERS[:1])
def test_clip_by_norm(case: Case) -> None:
    entries = case.shared["clip_by_norm_per_parameter"]
    assert len(entries) == 5
    for entry in entries:
        grads = {name: torch.tensor(grad, dtype=torch.float32) for name, grad in entry["grads"].items()}
        parameters = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
        optimizer = MomentumSGD([{"params": [parameter]} for parameter in parameters.values()])
        for name, grad in grads.items():
            parameters[name].grad = grad
        apply(optimizer, ["clip_grad_by_norm", entry["clip_norm"]])
        for name, after in entry["after"].items():
            assert equal(after, parameters[name].grad, CLOSE["*"])
