"""Leave the overflow check of an update on the device, where the host does not need its result.

With ``on_overflow="skip"`` there is one attempt, whatever its gradient. Optimizers that accept a flag skip their step
by it, buffers keep their values by it, and the loss scale and the number of applied updates follow it, all on the
device. `Deferral.reasons` yields why an update reads something on the host all the same. The result is the same, bit
for bit, as that of a run that reads the check.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from lockstep.precision import LossScale, cannot_skip, first_flagged
from lockstep.replicas import unpackable_buffer
from lockstep.updaters.setup.names import Names
from lockstep.updaters.setup.recipe import OnOverflow
from lockstep.updaters.state.training import TrainingState

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

    def reasons_to_check(self, names: Names) -> Iterator[str]:
        """Yield the reasons for which an update reads the overflow check on the host.

        Args:
            names: The optimizers that step.
        """
        if self.on_overflow != "skip":
            yield f"on_overflow={self.on_overflow!r} decides on the host whether there is another attempt"
        if self.num_processes > 1:
            yield "the processes report every attempt to each other"
        optimizers = [self.training.optimizers[name] for name in names]
        for name, optimizer in zip(names, optimizers, strict=True):
            reason = cannot_skip(optimizer, self.training.masters.get(name))
            if reason:
                yield reason
        if any(each.optimizer in optimizers for each in self.training.schedulers.values()):
            yield "a scheduler counts applied updates on the host"

    def reasons(self, names: Names) -> Iterator[str]:
        """Yield the reasons for which an update reads anything on the host; the user is told the first.

        Args:
            names: The optimizers that step.
        """
        yield from self.reasons_to_check(names)
        policy = self.training.scale.scale_class
        if policy.after_on_device is LossScale.after_on_device:
            yield f"{policy.__name__} does not override after_on_device"
        if self.has_tensor_weights:
            yield "whether a shard takes part depends on a weight that is a tensor"
        buffer = unpackable_buffer(self.training.replicas.model)
        if buffer:
            yield f"the buffer {buffer!r} is not a plain dense tensor"

    def defers(self, names: Names) -> bool:
        """Return whether the overflow check stays on the device; if it does not, log the reason once.

        Args:
            names: The optimizers that step.
        """
        reason = next(self.reasons_to_check(names), None)
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
        return check if next(self.reasons_to_check(names), None) is None else FiniteCheck(check.nonfinite)
