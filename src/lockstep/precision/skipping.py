"""Skip a step of an optimizer by a flag on the device that the host does not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.precision.masters import MasterWeights


class ChangesOnlyGradients:
    """The base class of step hooks that change gradients and nothing else.

    Such a hook stores nothing, draws no random numbers and writes nothing. It therefore does no harm before a step
    that is skipped on the device, where the host does not know whether the step was skipped.
    """


def cannot_skip(optimizer: Optimizer, masters: MasterWeights | None = None) -> str | None:
    """Return why the next step of an optimizer cannot be skipped by a flag on the device; None if it can.

    Args:
        optimizer: The optimizer. Its gradients must have been computed.
        masters: The master weights that the optimizer updates, if any. They may hold the gradients.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> cannot_skip(torch.optim.AdamW([weight], fused=True))
    >>> cannot_skip(torch.optim.AdamW([weight]))
    "AdamW takes no flag; torch's fused optimizers (fused=True) do"
    """
    name = type(optimizer).__name__
    if not vars(optimizer).get("_step_supports_amp_scaling", False):
        if isinstance(optimizer, Adagrad) and any(group["fused"] for group in optimizer.param_groups):
            return f"the fused Adagrad of torch {torch.__version__} takes no flag"
        return f"{name} takes no flag; torch's fused optimizers (fused=True) do"
    # Hooks run on the host, in skipped steps as well.
    hooks = chain(
        _global_optimizer_pre_hooks.values(),
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    if not all(isinstance(hook, ChangesOnlyGradients) for hook in hooks):
        return f"{name} has a hook of its step that may do more than change gradients"
    if isinstance(optimizer, SGD) and _lacks_velocity(optimizer, masters):
        # Skipped on the device, the step would leave the velocities uninitialized, and later steps would use them.
        return f"the first step of {name} with momentum creates its velocities"
    return None


@contextmanager
def skipped_if(optimizer: Optimizer, nonfinite: Tensor) -> Iterator[None]:
    """Return a context in which steps of an optimizer change nothing if a flag on the device is above 0.

    Args:
        optimizer: The optimizer, for which `cannot_skip` must return None.
        nonfinite: The flag: 0-d, float32.
    """
    # torch's fused kernels read the flag from these attributes.
    attributes: dict[str, Any] = vars(optimizer)
    attributes["found_inf"], attributes["grad_scale"] = nonfinite, None
    try:
        yield
    finally:
        # The next step may be a plain one, and must not be skipped by an old flag.
        del attributes["found_inf"], attributes["grad_scale"]


def _lacks_velocity(optimizer: SGD, masters: MasterWeights | None) -> bool:
    """Return whether the next step would create a velocity."""
    return any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None or (masters and masters.gradient_target(parameter).grad is not None)
    )
