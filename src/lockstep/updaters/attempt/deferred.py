"""Leave the overflow check of an update on the device, where the host does not need its result.

With ``on_overflow="skip"`` there is one attempt, whatever its gradient. Optimizers that accept a flag skip their step
by it, buffers keep their values by it, and the loss scale and the number of applied updates follow it, all on the
device. `SYNC_REASONS` lists what an update reads on the host all the same. The result is the same, bit for bit, as that
of a run that reads the check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import torch

from lockstep.precision import LossScale, cannot_skip, first_flagged
from lockstep.replicas import unpackable_buffer
from lockstep.updaters.setup import Names, OnOverflow
from lockstep.updaters.state import TrainingState

LOG = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """Whether a gradient is finite, known on the host.

    Attributes:
        nonfinite: The name of the first parameter whose gradient is not finite; None if all are.
        found_inf: Always None, because there is nothing for the device to decide.
    """

    nonfinite: str | None = None
    found_inf: None = None


class DeferredCheck:
    """Whether a gradient is finite, known on the device until it is read.

    Args:
        names: The names of the parameters that have a gradient.
        flags: One float32 per name: 1 where the gradient is not finite, else 0.

    >>> check = DeferredCheck(["weight", "bias"], torch.tensor([0.0, 1.0]))
    >>> check.found_inf, check.nonfinite
    (tensor(1.), 'bias')
    """

    def __init__(self, names: Sequence[str], flags: torch.Tensor) -> None:
        self.names = names
        self.flags = flags
        self.found_inf = flags.amax()
        """A 0-d tensor on the device, above 0 if the gradient is not finite."""

    @cached_property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite, or None; waits for the device."""
        return first_flagged(self.names, self.flags)


OverflowCheck: TypeAlias = FiniteCheck | DeferredCheck


Conditions: TypeAlias = dict[str, Callable[["Deferral", str], object]]
"""Conditions by the sentence that names the reason; each is checked for every optimizer that steps.

What a condition returns replaces the ``{}`` in its sentence.
"""

CHECK_REASONS: Final[Conditions] = {
    "on_overflow={!r} decides on the host whether there is another attempt": lambda deferral, _: (
        deferral.on_overflow != "skip" and deferral.on_overflow
    ),
    "the processes report every attempt to each other": lambda deferral, _: deferral.num_processes > 1,
    "{}": lambda deferral, name: cannot_skip(deferral.training.optimizers[name], deferral.training.masters.get(name)),
    "a scheduler counts applied updates on the host": lambda deferral, name: any(
        each.optimizer is deferral.training.optimizers[name] for each in deferral.training.schedulers.values()
    ),
}
"""The reasons for reading the overflow check, in the order in which they are checked."""

# The order is that of the answer: the first reason that applies is the one the user is told.
SYNC_REASONS: Final[Conditions] = CHECK_REASONS | {
    "{} does not override after_on_device": lambda deferral, _: (
        (policy := deferral.training.scale.scale_class).after_on_device is LossScale.after_on_device and policy.__name__
    ),
    "whether a shard takes part depends on a weight that is a tensor": lambda deferral, _: deferral.has_tensor_weights,
    "the buffer {!r} is not a plain dense tensor": lambda deferral, _: unpackable_buffer(
        deferral.training.replicas.model
    ),
}
"""All reasons for reading anything: those above, and others that apply where the check is deferred as well."""


@dataclass(slots=True)
class Deferral:
    """Decides whether the overflow check of an update is deferred.

    Attributes:
        on_overflow: What follows a non-finite gradient.
        num_processes: The number of processes of the run.
        training: The training state.
        has_tensor_weights: Whether weights of the last losses were tensors, for which the host had to wait.
        has_logged: Whether the log already explains why every update reads its check.
    """

    on_overflow: OnOverflow
    num_processes: int
    training: TrainingState
    has_tensor_weights: bool = False
    has_logged: bool = False

    def reason(self, names: Names, conditions: Conditions = SYNC_REASONS) -> str | None:
        """Return the first reason that applies to an update; None if none does.

        Args:
            names: The optimizers that step.
            conditions: The reasons to check.
        """
        for sentence, condition in conditions.items():
            for name in names:
                found = condition(self, name)
                if found:
                    return sentence.format(found)
        return None

    def defers(self, names: Names) -> bool:
        """Return whether the overflow check stays on the device; if it does not, log the reason once.

        Args:
            names: The optimizers that step.
        """
        reason = self.reason(names, CHECK_REASONS)
        if reason is not None and not self.has_logged:
            self.has_logged = True
            LOG.info("Every update reads whether its gradient is finite: %s.", reason)
        return reason is None

    def read_if_needed(self, check: OverflowCheck, names: Names) -> OverflowCheck:
        """Read a deferred check if these optimizers need it by now, for example because of a new hook.

        Args:
            check: The check of the gradient.
            names: The optimizers that step.
        """
        return check if self.reason(names, CHECK_REASONS) is None else FiniteCheck(check.nonfinite)
