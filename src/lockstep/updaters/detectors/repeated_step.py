"""Notice an optimizer whose step has another result when it is made twice."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

import torch
from torch.optim import Optimizer

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning
from lockstep.updaters.detectors.draws import generator_states

LIBRARIES: Final = ("torch.", "lockstep.")
"""Beginnings of the modules of optimizers that are known to be repeatable."""

MOST_ELEMENTS: Final = 2**24
"""The number of elements of an optimizer above which it is not copied."""


def warn_of_steps(functions: Iterable[object]) -> None:
    """Step copies of optimizers that are not PyTorch's or lockstep's, and warn if two copies differ.

    Hooks are left out, and so is an optimizer that is too large, or that cannot be copied and stepped alone.

    Args:
        functions: What steps next: optimizers, and hooks, which are not looked at. Gradients are set.
    """
    for optimizer in functions:
        if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith(LIBRARIES):
            continue
        before, found = generator_states([optimizer]), list[list[int]]()
        # It may hold what cannot be copied, or need more than its parameters and their gradients.
        with suppress(Exception):
            found = [_stepped(optimizer), _stepped(optimizer)]
        # Of generators that have moved another warning tells.
        if len(found) == 0 or found[0] == found[1] or generator_states([optimizer]) != before:
            continue
        warnings.warn(
            f"The step of {type(optimizer).__name__} has another result when it is made twice from the same weights, "
            "gradients and state: a clock, a counter or a generator of its own decides. Ranks would train on to other "
            "weights, and a resumed run as well. Derive the value from optimizer.state, from a parameter group or from "
            "torch's random numbers.",
            DeterminismWarning,
            stacklevel=2,
        )


def _stepped(optimizer: Optimizer) -> list[int]:
    """Return checksums of what a step would make of the parameters, and leave all as it was; none if they are large."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if sum(each.numel() for each in parameters) > MOST_ELEMENTS:
        return []
    memo: dict[int, Any] = {}
    # A scheduler has wrapped `step` of the object.
    held = {name: each for name, each in vars(optimizer).items() if name != "step"}
    copied: Any = object.__new__(type(optimizer))
    vars(copied).update(
        {name: OrderedDict() if name.endswith("_hooks") else deepcopy(each, memo) for name, each in held.items()}
    )
    for each in parameters:
        memo[id(each)].grad = None if each.grad is None else each.grad.clone()
    step: Any = type(optimizer).step
    with torch.random.fork_rng():
        # Below the wrapper that calls the hooks of all optimizers.
        getattr(step, "__wrapped__", step)(copied)
    return [checksum(memo[id(each)].detach()) for each in parameters]
