"""Runs with optimizers that ranks share out, and that must have the bits of runs with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import lockstep as ls
from lockstep import Communicator
from lockstep.compat.nnabla import SGDW
from lockstep.optim.hooks import GradientClipping
from tests.support.runs import finalized

NUM_UPDATES = 4

Make = Callable[[list[dict[str, Any]]], Optimizer]


class Uneven(nn.Module):
    """An embedding that is most of the model, a tied weight, many tiny tensors, a frozen one and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(601, 7)
        self.scales = nn.ParameterList([nn.Parameter(torch.full((1,), 1.0 + index / 64)) for index in range(17)])
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.conv = nn.Conv2d(7, 11, 3, padding=1)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.last = nn.Linear(11, 7)
        self.out = nn.Linear(7, 601, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x).transpose(1, 2).reshape(len(x), 7, 4, 4)
        if self.conv.weight.dim() == 4:
            hidden = hidden.contiguous(memory_format=torch.channels_last)
        for scale in self.scales:
            hidden = hidden * scale
        hidden = self.frozen(self.conv(hidden).mean((2, 3))) * self.scalar
        return nn.functional.cross_entropy(self.out(self.last(hidden)).float(), target)


@dataclass(frozen=True)
class Run:
    """A run to be made in several ways.

    Attributes:
        make: Creates the optimizer from parameter groups.
        options: Options of the updater.
        clips: Whether a hook of the step clips gradients.
        adds: Whether parameters join the optimizer after two updates.
    """

    make: Make
    options: dict[str, Any] = field(default_factory=dict)
    clips: bool = False
    adds: bool = False


def torch_run(name: str, **options: Any) -> Run:
    return Run(lambda groups: getattr(torch.optim, name)(groups, lr=0.01, **options))


HALF = {"precision": "bf16-true"}

RUNS: dict[str, Run] = {
    **{
        name: torch_run(name)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    },
    "SGD with momentum": torch_run("SGD", momentum=0.9, nesterov=True, weight_decay=0.01),
    "centered RMSprop": torch_run("RMSprop", centered=True, momentum=0.9),
    "AdamW, amsgrad": torch_run("AdamW", amsgrad=True),
    "AdamW, foreach": torch_run("AdamW", foreach=True),
    "AdamW, fused": torch_run("AdamW", fused=True),
    "Adagrad, fused": torch_run("Adagrad", fused=True),
    "SGD, fused": torch_run("SGD", momentum=0.9, fused=True),
    "AdamW, clipped": Run(torch_run("AdamW").make, {"clip_grad_norm": 0.05}),
    "AdamW, clipped by a hook": Run(torch_run("AdamW", foreach=True).make, clips=True),
    "AdamW, masters": Run(torch_run("AdamW").make, HALF),
    "AdamW, masters, fused": Run(torch_run("AdamW", fused=True).make, HALF | {"clip_grad_norm": 0.05}),
    "SGD, masters": Run(torch_run("SGD", momentum=0.9).make, HALF),
    "AdamW, more groups": Run(torch_run("AdamW").make, adds=True),
    "MomentumSGD": Run(lambda groups: ls.MomentumSGD(groups, lr=0.05, momentum=0.9, correction=True)),
    "CorrectedMomentumSGD": Run(lambda groups: ls.CorrectedMomentumSGD(groups, lr=0.05, momentum=0.9, dampening=0.1)),
    "CorrectedMomentumSGD, fused": Run(
        lambda groups: ls.CorrectedMomentumSGD(groups, lr=0.05, momentum=0.9, fused=True)
    ),
    "CorrectedMomentumSGD, zero": Run(
        lambda groups: ls.CorrectedMomentumSGD(groups, lr=0.05, momentum=0.9, missing_grad="zero")
    ),
    "SGDW": Run(lambda groups: SGDW(groups, lr=0.05, momentum=0.9, weight_decay=0.01)),
    "MomentumSGD, masters": Run(lambda groups: ls.MomentumSGD(groups, lr=0.05, momentum=0.9), HALF),
}
"""Elementwise optimizers in all their forms."""


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(601, (16,), generator=generator), torch.randint(601, (), generator=generator)) for _ in range(29)
    ]


def updater_of(
    run: Run, num_devices: int, *, shard: Any, communicator: Communicator | None = None, **options: Any
) -> ls.ParallelUpdater:
    """Build a run that has not begun."""
    torch.manual_seed(7)
    model = Uneven().to(memory_format=torch.channels_last)
    half = run.options.get("precision") == "bf16-true"
    if half:
        model.to(torch.bfloat16)
    late = [model.last.weight, model.last.bias] if run.adds else []
    known = [each for each in model.parameters() if all(each is not other for other in late)]
    optimizer = run.make([{"params": known[:5]}, {"params": known[5:], "lr": 0.02}])
    if run.clips:
        optimizer.register_step_pre_hook(GradientClipping(0.05))
    return ls.ParallelUpdater(
        ls.BatchIterator(samples(), 9, shuffle=True, last_batch="short", seed=3),
        optimizer,
        model,
        devices=["cpu"] * num_devices,
        num_shards=6,
        loss_fn=loss_of,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
        communicator=communicator,
        shard_optimizer=shard,
        **{**run.options, **options},
    )


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x, target)
    return loss


def advance(run: Run, updater: ls.ParallelUpdater, updates: int = NUM_UPDATES) -> str:
    """Train, and name everything that came out by its bits."""
    found = []
    for _ in range(updates):
        if run.adds and updater.iteration == 2:
            model, optimizer = updater.get_all_models()["main"], updater.get_optimizer("main")
            optimizer.add_param_group({"params": [model.last.weight, model.last.bias]})
        result = updater.update()
        found.append([float(result.loss), result.applied])
    return ls.digest(updater.state_dict(), found)


def trained(name: str, num_devices: int = 1, *, shard: Any = False, communicator: Communicator | None = None) -> str:
    run = RUNS[name]
    with finalized(updater_of(run, num_devices, shard=shard, communicator=communicator)) as updater:
        return advance(run, updater)


def all_trained(communicator: Communicator, names: list[str], devices: list[int]) -> dict[tuple[str, int], str]:
    """Make runs on several ranks that share the optimizer out."""
    return {(name, num): trained(name, num, shard=True, communicator=communicator) for name in names for num in devices}


class Foreign(Optimizer):
    """A third-party optimizer that is elementwise, and counts its steps in its groups and in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - the interface
        self.count += 1
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["seen"] = torch.zeros_like(parameter), 0
                state["seen"] += 1
                state["mean"].lerp_(parameter.grad.sign(), 0.1 + 0.2 / (group["step"] + self.count))
                parameter.add_(self.direction(state["mean"]), alpha=-group["lr"])

    def direction(self, mean: torch.Tensor) -> torch.Tensor:
        return mean


class Whole(Foreign):
    """Steps by a length that depends on the whole parameter."""

    def direction(self, mean: torch.Tensor) -> torch.Tensor:
        return mean / (mean.norm() + 1)


class Late(Whole):
    """Steps by such a length after a warm-up."""

    def direction(self, mean: torch.Tensor) -> torch.Tensor:
        return mean if self.count <= 4 else super().direction(mean)


class Noisy(Foreign):
    """Draws noise, of which pieces draw other numbers."""

    def direction(self, mean: torch.Tensor) -> torch.Tensor:
        return mean + 0.01 * torch.randn_like(mean)


class Named(Foreign):
    """Keeps state under a name, from the first step on."""

    def direction(self, mean: torch.Tensor) -> torch.Tensor:
        self.state["total"] = torch.tensor(self.count)  # type: ignore[index, assignment]  # a name, not a parameter
        return super().direction(mean)


class Stateless(Foreign):
    """Leaves an empty state for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - the interface
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Nested(Foreign):
    """Holds another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(params, lr=lr)
