"""MXNet's training on several devices: the same weights after every step, from a group and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from mxnet_nets import arrays, build
from mxnet_rules import optimizer_of, set_rate
from torch import nn
from traces import Case, Tolerance, cases, equal, tensor

import lockstep as ls

GIVEN = ["work_load_list", "kvstore", "optimizer", "optimizer_params", "batch", "rescale_grad"]
GIVEN += ["update_on_kvstore", "wd_mult", "params_init", "steps.*.data", "steps.*.label", "steps.*.lr"]
GIVEN += ["steps.*.rescale_grad"]
RUNS = cases("mxnet-nnabla/mxnet_module_train.json", num_cases=13, key="runs", given=GIVEN)
# The README's: gradients next to 0 decide signs in adam.
TOLERANCES = {"adam": Tolerance(7e-4, floor=0.0, offset=1e-3, peak=1e-5)}
OTHERS = Tolerance(1e-5, floor=0.0, offset=1e-3, peak=1e-6)


def make(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    names, weights = zip(*model.named_parameters(), strict=True)
    options = case["optimizer_params"]
    optimizer = optimizer_of(case["optimizer"], options, weights, names, wd_mult=case["wd_mult"])
    if case["optimizer"] == "lars" and case["update_on_kvstore"]:
        # It corrects the momentum at a change of the rate, but where keys come one by one of the first only.
        for group in optimizer.param_groups[1:]:
            group["correction"] = False
    return optimizer


@contextmanager
def rescaled(model: nn.Module, factor: float) -> Iterator[None]:
    """Let an optimizer see the gradients times a factor; afterwards they are as they were."""
    kept = [parameter.grad for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        assert gradient is not None
        parameter.grad = gradient * factor
    yield
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient


class CoreGroup:
    """The group of a case, in our names: what `train` asks of either."""

    def __init__(self, case: Case, model: nn.Module, mode: str) -> None:
        loads = case["work_load_list"]
        self.core = ls.ReplicaGroup(model, ["cpu"] * len(loads), workloads=loads, grad_mode=cast("Any", mode))

    def set_parameters(self, recorded: Mapping[str, Any]) -> None:
        self.core.set_parameters(arrays(recorded))

    def run(self, data: torch.Tensor, label: torch.Tensor) -> None:
        self.core.backward(torch.ones_like(self.core.forward((data, label))))

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.core.get_parameters()[0]

    def agree(self) -> bool:
        first, *others = [list(replica.parameters()) for replica in self.core.replicas]
        return all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def train(case: Case, kind: type[CoreGroup], mode: str) -> list[dict[str, Any]]:
    """Train by a group and an optimizer that sees the gradients times a factor."""
    model = build(case["params_init"])
    optimizer, group, records = make(case, model), kind(case, model, mode), []
    with group.core:
        group.set_parameters(case["params_init"])
        for step in case["steps"]:
            group.run(tensor(step["data"]), tensor(step["label"]))
            set_rate(optimizer, step["lr"])
            with rescaled(model, step["rescale_grad"]):
                optimizer.step()
            records.append({"params_after": group.parameters(), "devices_agree": group.agree()})
    return records


def replay(case: Case, kind: type[CoreGroup]) -> None:
    """Replay a run whose gradients were written or added; which of the two, its weights alone tell.

    The first step is the same for both, so the last one decides. One that is neither is compared as written.
    """
    near = TOLERANCES.get(case["optimizer"], OTHERS)
    ways = [train(case, kind, mode) for mode in ("write", "add")]
    last = case["steps"][-1]["params_after"]
    added = not equal(last, ways[0][-1]["params_after"], near) and equal(last, ways[1][-1]["params_after"], near)
    case.check({"steps": ways[added]}, {"*": near})


@pytest.mark.parametrize("case", RUNS)
def test_runs(case: Case) -> None:
    replay(case, CoreGroup)
