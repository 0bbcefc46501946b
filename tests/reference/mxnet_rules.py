"""MXNet's optimizers by what does their work here: rules of lockstep's and torch's, a group a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.compat.nnabla import LAMB
from lockstep.optim import MomentumSGD, hooks

Options = Mapping[str, Any]
Groups = list[dict[str, Any]]
"""One a parameter, with its options "decay" and "name" beside it."""
TINY = 1e-30
"""What stands for the epsilon of lars that is 0 unless it is given: ours is to change nothing."""


def sgd(options: Options, groups: Groups) -> Optimizer:
    """MXNet's sgd: clipped, decayed gradients, the rate inside the velocity."""
    optimizer = MomentumSGD(bare(groups), momentum=options.get("momentum", 0.0))
    for index, group in enumerate(groups):
        clip(optimizer, options, index)
        if group["decay"]:
            optimizer.add_hook(hooks.WeightDecay(group["decay"]), group=index)
    return optimizer


def lars(options: Options, groups: Groups) -> Optimizer:
    """MXNet's lars, which treats biases and the numbers of a normalization as sgd does."""
    correction = options.get("momentum_correction", True)
    optimizer = MomentumSGD(bare(groups), momentum=options.get("momentum", 0.0), correction=correction)
    rates = {"threshold": 0.0, "coefficient": options.get("eta", 0.001), "eps": options.get("eps") or TINY}
    bound = options.get("clip_gradient")
    for index, group in enumerate(groups):
        if not group["name"].endswith(("gamma", "beta", "bias")):
            optimizer.add_hook(hooks.GradientLARS(**rates, weight_decay=group["decay"], clip=bound), group=index)
            continue
        clip(optimizer, options, index)
        if group["decay"]:
            optimizer.add_hook(hooks.WeightDecay(group["decay"]), group=index)
    return optimizer


def adam(options: Options, groups: Groups) -> Optimizer:
    """MXNet's adam, whose epsilon comes before the correction of the second moment, and decay before the clipping.

    Its moments decay by the nearest numbers in float32, whose 1 - beta2 is 1e-5 off; its correction knows the betas.
    """
    betas = options.get("beta1", 0.9), options.get("beta2", 0.999)
    narrow = tuple(torch.tensor(betas).tolist())
    optimizer = torch.optim.Adam(bare(groups), betas=narrow)
    rates = [0.0 for _ in groups]

    def set_numbers(*_: Any) -> None:
        for index, (group, given) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            (weight,) = group["params"]
            if given["decay"]:
                hooks.WeightDecay(given["decay"])(optimizer, weight)
            kept = optimizer.state.get(weight, {})
            count = int(kept["step"]) + 1 if kept else 1
            corrections = [[1 - beta**count for beta in each] for each in (betas, narrow)]
            wanted, torchs = (second**0.5 / first for first, second in corrections)
            rates[index] = group["lr"]
            group["lr"] *= wanted / torchs
            group["eps"] = options.get("epsilon", 1e-8) / corrections[1][1] ** 0.5

    def set_rates_back(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(set_numbers)
    optimizer.register_step_post_hook(set_rates_back)
    return clipping(optimizer, options)


def lamb(options: Options, groups: Groups) -> Optimizer:
    """MXNet's lamb, to which a bound of nothing is none."""
    optimizer = LAMB(
        with_decay(groups),
        betas=(options.get("beta1", 0.9), options.get("beta2", 0.999)),
        eps=options.get("epsilon", 1e-6),
        norm_bounds=(options.get("lower_bound") or 0.0, options.get("upper_bound") or math.inf),
        threshold=0.0,
        bias_correction=options.get("bias_correction", True),
    )
    return clipping(optimizer, options)


class Nag(Optimizer):
    """MXNet's nag of version 1.9.1, whose velocity decays by the weight that was moved already.

    Nothing of lockstep: it shows what is around it.
    """

    def __init__(self, params: Any, momentum: float) -> None:
        super().__init__(params, {"lr": 0.01, "momentum": momentum, "weight_decay": 0.0})

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


def nag(options: Options, groups: Groups) -> Optimizer:
    """MXNet's nag, by a rule of the tests."""
    return clipping(Nag(with_decay(groups), options.get("momentum", 0.0)), options)


OURS: dict[str, Callable[[Options, Groups], Optimizer]] = {
    "sgd": sgd,
    "lars": lars,
    "adam": adam,
    "lamb": lamb,
}
"""What lockstep or torch has."""
RULES = {**OURS, "nag": nag}
"""With what only the tests have."""


def optimizer_of(
    rule: str,
    options: Options,
    weights: Sequence[Tensor],
    names: Sequence[str] | None = None,
    *,
    wd_mult: Mapping[str, float] | None = None,
) -> Optimizer:
    """Make an optimizer with a group for each weight, for the original treats it by its name.

    Args:
        rule: One of `RULES`.
        options: The original's own, but for "rescale_grad".
        weights: What it moves.
        names: Theirs. Of weights with names, the original decays those that end in weight or, but for lars, gamma.
        wd_mult: Multiplies the decay by name, where the original was told so.
    """
    found = ["weight"] * len(weights) if names is None else names
    decayed = ("weight",) if rule == "lars" else ("weight", "gamma")
    usual = {name: float(name.endswith(decayed)) for name in found}
    factors = usual if wd_mult is None else {name: wd_mult.get(name, 1.0) for name in found}
    groups = [
        {"params": [weight], "name": name, "decay": options.get("wd", 0.0) * factors[name]}
        for weight, name in zip(weights, found, strict=True)
    ]
    optimizer = RULES[rule](options, groups)
    set_rate(optimizer, options.get("learning_rate", 0.01))
    return optimizer


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(optimizer: MomentumSGD, options: Options, group: int) -> None:
    """Clip the gradient of one group, before it decays."""
    if "clip_gradient" in options:
        bound = options["clip_gradient"]
        optimizer.add_hook(hooks.GradientHardClipping(-bound, bound), group=group)


def clipping(optimizer: Optimizer, options: Options) -> Optimizer:
    """Clip the gradients of an optimizer of torch's, before it decays them by itself."""
    if "clip_gradient" in options:
        bound = options["clip_gradient"]
        optimizer.register_step_pre_hook(hooks.GradientHardClipping(-bound, bound))
    return optimizer


def with_decay(groups: Groups) -> Groups:
    """Have torch's optimizers decay by themselves."""
    return [{"params": group["params"], "weight_decay": group["decay"]} for group in groups]


def bare(groups: Groups) -> Groups:
    """Leave out what is none of an optimizer's options."""
    return [{"params": group["params"]} for group in groups]
