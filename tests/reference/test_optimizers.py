"""Replay what Chainer's momentum optimizers did with given gradients (optimizers.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD

REFERENCE = Path(
    os.environ.get("LOCKSTEP_REFERENCE", Path(__file__).resolve().parents[3] / "shared" / "reference")
)
TRACE = REFERENCE / "chainer-cunn" / "traces" / "optimizers.json"

if not TRACE.exists():
    pytest.skip(f"the recorded traces are not at {REFERENCE}", allow_module_level=True)

DATA = json.loads(TRACE.read_text())
# Relative to max(1, |value|), as the traces' own description suggests: the originals round in
# another order of operations.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
CLASSES: dict[str, type[HookedOptimizer]] = {
    "MomentumSGD": MomentumSGD,
    "CorrectedMomentumSGD": CorrectedMomentumSGD,
}


def agree(actual: torch.Tensor, expected: list[float], dtype: str) -> None:
    wanted = torch.tensor(expected, dtype=actual.dtype)
    error = (actual.detach().flatten() - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() <= TOLERANCE[dtype]


def build(case: dict[str, Any]) -> tuple[HookedOptimizer, dict[str, torch.nn.Parameter]]:
    """Give every parameter a group of its own, as Chainer gives each a rule of its own."""
    dtype = getattr(torch, case["dtype"])
    parameters = {
        name: torch.nn.Parameter(torch.tensor(array["data"], dtype=dtype).reshape(array["shape"]))
        for name, array in DATA[case["init_from"]].items()
    }
    groups = [
        {
            "params": [parameter],
            "frozen": name in case["disabled_params"],
            **case["param_overrides"].get(name, {}),
        }
        for name, parameter in parameters.items()
    ]
    return CLASSES[case["optimizer"]](groups, missing_grad="zero"), parameters


@pytest.mark.parametrize(
    "case", [case for case in DATA["cases"] if not case["hooks"]], ids=lambda case: case["name"]
)
def test_optimizer_follows_chainer(case: dict[str, Any]) -> None:
    optimizer, parameters = build(case)
    for step, grads in zip(case["steps"], DATA["grads_float32"], strict=True):
        for group, name in zip(optimizer.param_groups, parameters, strict=True):
            group |= {"lr": step["lr"], "momentum": step["momentum"]} | case["param_overrides"].get(name, {})  # noqa: PLW2901 - updated in place
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            missing = name in step.get("missing_grad", [])
            parameter.grad = (
                None if missing else torch.tensor(grad, dtype=parameter.dtype).reshape(parameter.shape)
            )
        optimizer.step()
        assert optimizer.t == step["t"]
        for name, parameter in parameters.items():
            agree(parameter, step["param"][name], case["dtype"])
            if step["v"][name] is None:
                assert parameter not in optimizer.state
                assert step["rule_t"][name] == 0
            else:
                agree(-optimizer.state[parameter]["velocity"], step["v"][name], case["dtype"])
                assert step["rule_t"][name] == optimizer.t
