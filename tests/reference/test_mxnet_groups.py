"""MXNet's executor groups: outputs, gradients, metrics and parameters, per device and merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mxnet_groups import GIVEN, Replay, replay
from mxnet_nets import build
from torch import nn
from traces import Case, Tolerance, cases, columns, tensor

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
    ours = replay(case)
    given = [each.replace("steps.*.", "steps.") for each in GIVEN]
    case = replace(case, given=["name", *given])
    case.in_columns().check({**ours, "steps": columns(ours["steps"])}, BATCH_NORM_TOLERANCES)


LAYOUTS = cases("mxnet-nnabla/mxnet_group_layouts.json", num_cases=19, given=GIVEN)


class Tanh(nn.Module):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data.tanh()


class ThreeOutputs(nn.Module):
    def forward(
        self, b: torch.Tensor, shared: torch.Tensor, a: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return a * shared, b.tanh(), shared.square()


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: Case) -> None:
    model = ThreeOutputs() if case["name"] == "multi_input_output" else Tanh()
    run = Replay(case, model)
    ours = {"steps": run.run(), "grad_req_effective": run.effective()}
    if "get_outputs_begin_1_merged_shapes" in case:
        merged = ours["steps"][-1]["outputs_merged"]
        ours["get_outputs_begin_1_merged_shapes"] = [list(output.shape) for output in merged[1:]]
    case.check(ours, TOLERANCES)


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
    if case["name"] == "shared_group_second":
        main = next(each.values[0] for each in GRAD_REQ if each.values[0]["name"] == "shared_group_main")
        case.check(shared(main, case), TOLERANCES)
    else:
        case.check(replay(case), TOLERANCES)


def shared(main: Case, second: Case) -> dict[str, Any]:
    """Run the second group on the memory of the first one, and see that it is the same."""
    init = main["steps"][0]["arg_params"]
    first = Replay(main, build("mlp_softmax", init))
    first.run()
    other = Replay(second, build("mlp_softmax", init), shared=first)
    steps = other.run()
    pairs = list(zip(first.model.parameters(), other.model.parameters(), strict=True))
    facts = {
        "param_memory_shared": all(a.data_ptr() == b.data_ptr() for a, b in pairs),
        "grad_memory_shared": all(a.grad is b.grad is not None for a, b in pairs),
    }
    assert facts == second.shared["shared_group_facts"]
    return {"steps": steps, "grad_req_effective": other.effective()}
