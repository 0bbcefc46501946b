"""MXNet's executor groups: outputs, gradients, metrics and parameters, per device and merged."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from mxnet_groups import GIVEN, Replay, replay
from torch import nn
from traces import Case, Tolerance, cases, columns, earlier, tensor

import lockstep as ls

# The description's form: |ours - original| over a small number plus the original's value. Its figures, 2e-6
# for outputs and 1e-3 as the small number, are those of its cases on one processor. Another rounds another
# way: a score of 20 before the softmax moves by 2e-6, and so does what is left of terms that cancel; a
# probability near 1 moves by 6e-8, and with it a gradient that is the small rest to 1, times weights and
# inputs. Batch normalisation of few samples, and the gradient of the bias before it, which is 0 but for
# rounding, are such.
OUTPUTS = Tolerance(1e-5, floor=0.0, offset=1e-3, peak=1e-6)
TOLERANCES = {
    "steps.*outputs_*": OUTPUTS,
    "steps.*metrics.*": Tolerance(1e-5),
    "steps.*grads_*": Tolerance(1e-4, floor=0.0, offset=1e-2, peak=1e-6),
    "steps.*aux_*": Tolerance(1e-5, floor=0.0, offset=1e-3),
    "steps.*arg_params.*": Tolerance(1e-7),  # the original adds equal values up and divides
}
# What the normalisation takes out: the rounding errors of terms that cancel, which grow as a variance shrinks.
NOTHING = {"steps.*grads_*.fc1_bias*": Tolerance(1e-5)}

GROUPS = cases("mxnet-nnabla/mxnet_group.json", num_cases=12, given=GIVEN)


@pytest.mark.parametrize("case", GROUPS)
def test_groups(case: Case) -> None:
    case.check(replay(case), TOLERANCES)


BATCH_NORM = cases("mxnet-nnabla/mxnet_group_batchnorm.json", num_cases=4, given=GIVEN)


@pytest.mark.parametrize("case", BATCH_NORM)
def test_batch_normalisation(case: Case) -> None:
    check_columns(case, Replay)


def check_columns(case: Case, group: type[Replay]) -> None:
    """Replay a case and compare all steps at once, field by field."""
    ours = replay(case, group)
    given = [each.replace("steps.*.", "steps.") for each in GIVEN]
    case = replace(case, given=["name", *given])
    case.in_columns().check({**ours, "steps": columns(ours["steps"])}, {**NOTHING, **TOLERANCES})


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


def told(before: str, data: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """Give the state that is told to a forward: zeros, one value, or what the forward before it put out."""
    value = re.match(r"set_states\(value=(.*)\)", before)
    if value is not None:
        return torch.full_like(data, float(value[1]))
    return torch.zeros_like(data) if before.startswith("nothing") else merged


@pytest.mark.parametrize("case", STATES)
def test_states_are_inputs(case: Case) -> None:
    """What the original keeps between forwards is an input here, which the caller hands on."""
    loads = [float(stop - start) for start, stop in case["slices"]]
    with ls.ReplicaGroup(Recurrent(), ["cpu"] * case["contexts"], workloads=loads) as group:
        steps: list[dict[str, Any]] = []
        merged = torch.zeros(())
        for step in case["steps"]:
            data = tensor(step["data"])
            state = told(step["before"], data, merged)
            merged = group.forward((data, state))
            parts = group.outputs(merge=False)
            states = [[state[run] for run in group.slices]]
            steps.append({"states_per_device": states, "outputs_per_device": parts, "outputs_merged": [merged]})
        slices = [[run.start, run.stop] for run in group.slices]
    effective = dict.fromkeys(["data", *case["state_names"]], "null")
    case.check({"slices": slices, "grad_req_effective": effective, "steps": steps}, {"*": OUTPUTS})


GRAD_REQ = cases("mxnet-nnabla/mxnet_group_grad_req.json", num_cases=11, given=GIVEN)


@pytest.mark.parametrize("case", GRAD_REQ)
def test_grad_modes(case: Case) -> None:
    case.check(replay(case, before=earlier(case, GRAD_REQ)), TOLERANCES)
