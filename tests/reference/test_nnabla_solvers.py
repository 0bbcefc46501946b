"""NNabla's solvers: rates, decay, clipping, and gradients that were never written."""

from __future__ import annotations

import pytest
import torch
from nnabla_rules import RULES, Momentum
from traces import Case, Tolerance, cases, equal, tensor

from lockstep.optim import HookedOptimizer

GIVEN = ["solver", "args", "mode", "weight_decay_is_fused", "params_init", "steps.*.grads", "steps.*.calls"]
# The traces' description, of |value| + 1e-3: parameters after training; what is remembered, as gradients. What is left
# of larger terms has their rounding errors.
CLOSE = {
    "*.state_after.*": Tolerance(1e-4, floor=0.0, offset=1e-3, peak=1e-6),
    "*": Tolerance(1e-5, floor=0.0, offset=1e-3, peak=1e-6),
}

SOLVERS = cases(
    "mxnet-nnabla/nnabla_solvers.json",
    num_cases=40,
    given=GIVEN,
    key="solvers",
    name=lambda content: f"{content['solver']}/{content['mode']}",
)


@pytest.mark.parametrize("case", SOLVERS)
def test_replay(case: Case) -> None:
    parameters = {name: torch.nn.Parameter(tensor(array)) for name, array in case["params_init"].items()}
    solver = RULES[case["solver"]](parameters.values(), *case["args"])
    steps = []
    for number, step in enumerate(case["steps"], start=1):
        for name, grad in step["grads"].items():
            parameters[name].grad = None if grad is None else tensor(grad)
        for call, *args in step["calls"]:
            getattr(solver, call)(*args)
        steps.append(
            {
                "params_after": {name: each.detach().clone() for name, each in parameters.items()},
                "t_after": {name: solver.count(each) for name, each in parameters.items()},
                "state_after": {name: solver.state(each) for name, each in parameters.items()},
                "lr_after": solver.optimizer.param_groups[0]["lr"],
            }
        )
        if isinstance(solver.optimizer, HookedOptimizer):
            assert solver.optimizer.t == number
    case.check({"steps": steps}, CLOSE)


@pytest.mark.parametrize("case", SOLVERS[:1])
def test_clip_by_norm(case: Case) -> None:
    entries = case.shared["clip_by_norm_per_parameter"]
    assert len(entries) == 5
    for entry in entries:
        grads = {name: torch.tensor(grad, dtype=torch.float32) for name, grad in entry["grads"].items()}
        parameters = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
        solver = Momentum(parameters.values(), 0.1, 0.9)
        for name, grad in grads.items():
            parameters[name].grad = grad
        solver.clip_grad_by_norm(entry["clip_norm"])
        for name, after in entry["after"].items():
            assert equal(after, parameters[name].grad, CLOSE["*"])
