"""MXNet's executor groups: outputs, gradients, metrics and parameters, per device and merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mxnet_groups import GIVEN, Replay, replay
from torch import nn
from traces import Case, Tolerance, cases, columns, earlier, tensor

import lockstep as ls

# The README's: outputs 2e-6 and gradients 1e-4, over 1e-3 plus the original's value.
TOLERANCES = {
    "steps.*outputs_*": Tolerance(2e-6, floor=1e-3),
    "steps.*metrics.*": Tolerance(2e-6),
    "steps.*grads_*": Tolerance(1e-4, floor=1e-3),
    "steps.*aux_*": Tolerance(1e-5, floor=1e-3),
    "steps.*arg_params.*": Tolerance(1e-7),  # the original adds equal values up and divides
}

GROUPS = cases("mxnet-nnabla/mxnet_group.json", num_cases=12, given=GIVEN)


@pytest.mark.parametrize("case", GROUPS)
def test_groups(case: Case) -> None:
    case.check(replay(case), TOLERANCES)


BATCH_NORM = cases("mxnet-nnabla/mxnet_group_batchnorm.json", num_cases=4, given=GIVEN)
# The gradient of fc1_bias is 0 but for rounding: batch normalisation takes it out.
BATCH_NORM_TOLERANCES = {"steps.*grads_*.fc1_bias*": Tolerance(1e-6), **TOLERANCES}


@pytest.mark.parametrize("case", BATCH_NORM)
def test_batch_normalisation(case: Case) -> None:
    check_columns(case, Replay)


def check_columns(case: Case, group: type[Replay]) -> None:
    """Replay a case and compare all steps at once, field by field."""
    ours = replay(case, group)
    given = [each.replace("steps.*.", "steps.") for each in GIVEN]
    case = replace(case, given=["name", *given])
    case.in_columns().check({**ours, "steps": columns(ours["steps"])}, BATCH_NORM_TOLERANCES)


LAYOUTS = cases("mxnet-nnabla/mxnet_group_layouts.json", num_cases=19, given=GIVEN)


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: Case) -> None:
    case.check(replay(case), TOLERANCES)


STATES = cases(
    "mxnet-nnabla/mxnet_group_layouts.json",
    num_cases=3,
    key="states",
    given=["contexts", "work_load_list", "state_names", "steps.*.before", "steps.*.data"],
    differ=False,
)


class Recurrent(nn.Module):
    def forward(self, data: torch.Tensor, s0: torch.Tensor) -> torch.Tensor:
        return torch.tanh(data + s0)


@pytest.mark.parametrize("case", STATES)
def test_states_are_inputs(case: Case) -> None:
    """What the original keeps between forwards is an input here, which the caller hands on."""
    given = {"nothing": 0.0, "set_states(value=0.5)": 0.5}
    with ls.ReplicaGroup(Recurrent(), ["cpu"] * case["contexts"], workloads=case["work_load_list"]) as group:
        steps: list[dict[str, Any]] = []
        merged = torch.zeros(())
        for step in case["steps"]:
            data = tensor(step["data"])
            value = given.get(step["before"].partition(" (")[0])
            state = merged if value is None else torch.full_like(data, value)
            merged = group.forward((data, state))
            parts = group.outputs(merge=False)
            states = [[state[run] for run in group.slices]]
            steps.append(
                {"states_per_device": states, "outputs_per_device": parts, "outputs_merged": [merged]}
            )
        slices = [[run.start, run.stop] for run in group.slices]
    effective = {"data": "null", "s0": "null"}
    case.check(
        {"slices": slices, "grad_req_effective": effective, "steps": steps}, {"*": Tolerance(2e-6, 1e-3)}
    )


GRAD_REQ = cases("mxnet-nnabla/mxnet_group_grad_req.json", num_cases=11, given=GIVEN)


@pytest.mark.parametrize("case", GRAD_REQ)
def test_grad_modes(case: Case) -> None:
    case.check(replay(case, before=earlier(case, GRAD_REQ)), TOLERANCES)
