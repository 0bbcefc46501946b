"""Decide which optimizers the ranks share out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.precision import asks_for_closure, parameters_of
from lockstep.updaters.ranks.rank_reduction import RankReduction
from lockstep.updaters.state.sharding import ShardedState
from lockstep.updaters.state.training import TrainingState
from lockstep.updaters.step.sharing import SharedStep, steps_elements
from lockstep.updaters.step.stepping import can_step_in_parts

LOG = logging.getLogger("lockstep")

ShardOptimizer: TypeAlias = 'Literal["auto", True, False]'

LARGE: Final = 8_000_000
"""Elements. Optimizers of fewer parameters are not shared out by default, because they would gain nothing."""

_NOT_CUT: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers of PyTorch that look at whole parameters, or at all of them."""


def check_shardable(chosen: object, optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Check that every optimizer can be shared out, if that is asked for.

    Args:
        chosen: The argument `shard_optimizer` of the updater.
        optimizers: The optimizers by name.
        model: All networks.

    Raises:
        ValueError: If the argument is out of range, or an optimizer cannot be shared out.
    """
    if not isinstance(chosen, bool) and chosen != "auto":
        raise ValueError(f"`shard_optimizer` must be True, False or 'auto', got {chosen!r}.")
    for name, optimizer in optimizers.items() if chosen is True else ():
        reason = why_whole(optimizer, model)
        if reason is not None:
            raise ValueError(
                f"`shard_optimizer` must be False or 'auto' for the {type(optimizer).__name__} {name!r}, which "
                f"{reason}."
            )


def why_whole(optimizer: Optimizer, model: nn.Module) -> str | None:
    """Return why an optimizer cannot be shared out; None if it can, or if only its first steps can tell.

    Args:
        optimizer: The optimizer.
        model: All networks.
    """
    kind = type(optimizer)
    if asks_for_closure(optimizer) or (kind.__module__.startswith("torch.") and kind.__name__ in _NOT_CUT):
        return "looks at whole parameters or at all of them, of which no piece can be stepped alone"
    if can_step_in_parts(optimizer) and not steps_elements(optimizer):
        return "looks at whole parameters, of which no piece can be stepped alone"
    if any(isinstance(each, Optimizer) for each in vars(optimizer).values()):
        return "holds another optimizer, whose state is not known here"
    held = set(map(id, parameters_of(optimizer)))
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(id(each) in held for each in module.parameters()):
            return f"has sparse gradients of {path!r}, which cannot be cut"
    for group in optimizer.param_groups:
        for name, value in group.items():
            # One per element.
            if name != "params" and isinstance(value, torch.Tensor) and value.numel() > 1:
                return f"has a tensor of shape {tuple(value.shape)} as its option {name!r}, which cannot be cut"
    return None


def share_out(
    training: TrainingState,
    communicator: Communicator,
    chosen: ShardOptimizer,
    ranks: RankReduction,
) -> dict[str, SharedStep]:
    """Share out the optimizers of a run over its ranks, where that is chosen.

    Args:
        training: The training state, which gets what this rank holds of the state of each.
        communicator: The communicator of the run.
        chosen: The argument `shard_optimizer` of the updater.
        ranks: The reduction over ranks. By default, if they are on several machines, no more is sent than without
            sharing.

    Returns:
        The steps of the optimizers that are shared out, by name.
    """
    if chosen is False:
        return {}
    model, shared = training.replicas.model, {}
    for name, optimizer in training.optimizers.items():
        if chosen == "auto" and not (ranks.one_machine and _gains(optimizer) and why_whole(optimizer, model) is None):
            continue
        training.sharded[name] = ShardedState(optimizer, communicator, ranks.coordinator.start_gather)
        shared[name] = SharedStep(training.sharded[name], communicator)
    if shared and communicator.rank == 0:
        LOG.info(
            "Each of the %d ranks steps its part of the weights and holds the state of %s for it. `state_dict` is a "
            "call of all ranks, and if a rank is lost the run goes on from its newest snapshot, because no rank has "
            "the whole state. `shard_optimizer=False` keeps all of it on every rank, with the same bits.",
            communicator.size,
            ", ".join(map(repr, shared)),
        )
    return shared


def _gains(optimizer: Optimizer) -> bool:
    """Return whether sharing out is safe and worth it without being asked for."""
    parameters = parameters_of(optimizer)
    if not steps_elements(optimizer) or any(map(is_lazy, parameters)):
        return False
    size: int = sum(each.numel() for each in parameters if each.requires_grad)
    return size >= LARGE
