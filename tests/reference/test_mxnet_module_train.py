"""MXNet's training on several devices: the same weights after every step, from a group and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mxnet_nets import arrays, build
from torch import nn
from traces import Case, Tolerance, cases, tensor

import lockstep as ls
from lockstep.optim import hooks

GIVEN = ["work_load_list", "kvstore", "optimizer", "optimizer_params", "batch", "rescale_grad"]
GIVEN += ["update_on_kvstore", "wd_mult", "params_init", "steps.*.data", "steps.*.label", "steps.*.lr"]
GIVEN += ["steps.*.rescale_grad"]
RUNS = cases("mxnet-nnabla/mxnet_module_train.json", num_cases=13, key="runs", given=GIVEN)
# The README's: gradients next to 0 decide signs in adam.
TOLERANCES = {"adam": Tolerance(7e-4, floor=1e-3)}
OTHERS = Tolerance(1e-5, floor=1e-3)


class Nag(torch.optim.Optimizer):
    """MXNet's nag of version 1.9.1, whose velocity decays by the weight that was moved already."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                pulled = group["momentum"] * velocity
                gradient = weight.grad + group["weight_decay"] * weight
                weight.add_(group["momentum"] * (pulled - group["lr"] * gradient) - group["lr"] * gradient)
                moved = weight.grad + group["weight_decay"] * weight
                velocity.copy_(pulled - group["lr"] * moved)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Give each parameter a group, for the original treats it by its name."""
    options = case["optimizer_params"]
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in model.parameters()]
    decays = [options.get("wd", 0.0) * case["wd_mult"].get(name, 1.0) for name, _ in model.named_parameters()]
    lr, momentum = options["learning_rate"], options.get("momentum", 0.0)
    if case["optimizer"] in ("adam", "nag"):
        groups = [{**group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
        if case["optimizer"] == "adam":
            return torch.optim.Adam(groups, lr=lr)
        return Nag(groups, lr, momentum)
    if (
        case["optimizer"] == "lars"
    ):  # corrects the momentum at a change of the rate, but of its first key only
        groups[0]["correction"] = True
    optimizer = ls.MomentumSGD(groups, lr=lr, momentum=momentum)
    for index, (group, decay) in enumerate(zip(groups, decays, strict=True)):
        if "clip_gradient" in options:
            bound = options["clip_gradient"]
            optimizer.add_hook(hooks.GradientHardClipping(-bound, bound), group=index)
        if case["optimizer"] == "lars" and group["params"][0].dim() > 1:
            lars = hooks.GradientLARS(threshold=0.0, weight_decay=decay, eps=1e-8)
            optimizer.add_hook(lars, group=index)
        elif decay:
            optimizer.add_hook(hooks.WeightDecay(decay), group=index)
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, case: Case, lr: float, number: int) -> None:
    eta = case["optimizer_params"].get("eta", 1.0)
    for group in optimizer.param_groups:
        if case["optimizer"] == "adam":  # the original adds its epsilon before it corrects the second moment
            group["eps"] = 1e-8 / (1 - 0.999**number) ** 0.5
        group["lr"] = lr * (eta if group["params"][0].dim() > 1 else 1.0)


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


def train(case: Case) -> list[dict[str, Any]]:
    model = build("mlp_softmax", case["params_init"])
    optimizer = optimizer_of(case, model)
    records = []
    mode: Any = "add" if "grad_req_add" in case["name"] else "write"
    loads = case["work_load_list"]
    with ls.ReplicaGroup(model, ["cpu"] * len(loads), workloads=loads, grad_mode=mode) as group:
        group.set_parameters(arrays(case["params_init"]))
        for number, step in enumerate(case["steps"], start=1):
            out = group.forward((tensor(step["data"]), tensor(step["label"])))
            group.backward(torch.ones_like(out))
            set_rates(optimizer, case, step["lr"], number)
            with rescaled(model, step["rescale_grad"]):
                optimizer.step()
            replicas = [list(replica.parameters()) for replica in group.replicas]
            agree = all(
                torch.equal(a, b) for other in replicas for a, b in zip(other, replicas[0], strict=True)
            )
            records.append({"params_after": group.get_parameters()[0], "devices_agree": agree})
    return records


@pytest.mark.parametrize("case", RUNS)
def test_runs(case: Case) -> None:
    tolerance = TOLERANCES.get(case["optimizer"], OTHERS)
    case.check({"steps": train(case)}, {"*": tolerance})
