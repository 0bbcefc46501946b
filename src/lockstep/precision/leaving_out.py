"""Leave an optimizer's step out by a flag that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.precision.masters import MasterWeights


class ChangesOnlyGradients:
    """The promise of a hook of a step to change gradients and nothing else; inherit from it to give it.

    Such a hook remembers nothing, draws nothing and writes nothing, so it does no harm where the step that it
    was called for is left out on the device, and nobody needs to know there whether it was.
    """


def cannot_skip(optimizer: Optimizer, masters: MasterWeights | None = None) -> str | None:
    """Return why the optimizer's next step cannot be left out by a flag on the device; None if it can.

    Args:
        optimizer: Its gradients are there.
        masters: What it moves in the place of parameters, and where their gradients may be.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> cannot_skip(torch.optim.AdamW([weight], fused=True))
    >>> cannot_skip(torch.optim.AdamW([weight]))
    "AdamW takes no flag; torch's fused optimizers (fused=True) do"
    """
    name = type(optimizer).__name__
    if not vars(optimizer).get("_step_supports_amp_scaling", False):
        return f"{name} takes no flag; torch's fused optimizers (fused=True) do"
    hooks = chain(
        _global_optimizer_pre_hooks.values(),
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    if not all(isinstance(hook, ChangesOnlyGradients) for hook in hooks):
        return f"{name} has a hook of its step that may do more than change gradients"
    if isinstance(optimizer, SGD) and _lacks_velocity(optimizer, masters):
        # Left out on the device, the step would leave velocities uninitialised, which move the weights later.
        return f"the first step of {name} with momentum makes its velocities"
    return None


@contextmanager
def left_out_if(optimizer: Optimizer, nonfinite: Tensor) -> Iterator[None]:
    """Have steps of the optimizer change nothing if a flag on the device is above 0.

    Args:
        optimizer: One of which `cannot_skip` returns None.
        nonfinite: 0-d, float32; put where torch's fused kernels look for it.
    """
    slots: dict[str, Any] = vars(optimizer)
    slots["found_inf"], slots["grad_scale"] = nonfinite, None
    try:
        yield
    finally:
        del slots["found_inf"], slots["grad_scale"]


def _lacks_velocity(optimizer: SGD, masters: MasterWeights | None) -> bool:
    return any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None or (masters and masters.receiver(parameter).grad is not None)
    )
