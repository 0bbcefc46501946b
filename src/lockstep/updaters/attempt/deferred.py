"""Leave the overflow check of an update on the device, where nothing on the host has to know what it finds.

With ``on_overflow="skip"`` there is one attempt, whatever comes of it. Optimizers that take a flag leave
their step out by it, buffers keep their values by it, and the loss scale and the count of applied updates
follow it, all on the device. `REASONS` lists what an update reads on the host all the same. The bits are
those of the same run that reads.
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
from lockstep.updaters.state import Training

LOG = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """Whether a gradient is finite, as the host knows it.

    Attributes:
        nonfinite: The name of the first parameter whose gradient is not finite; None if all are.
        flag: Nothing that the device would have to look at.
    """

    nonfinite: str | None = None
    flag: None = None


class DeferredCheck:
    """Whether a gradient is finite, on the device until somebody looks.

    Args:
        names: The names of the parameters that have a gradient.
        flags: One float32 for each name, 1 where the gradient is not finite, else 0.

    >>> check = DeferredCheck(["weight", "bias"], torch.tensor([0.0, 1.0]))
    >>> check.flag, check.nonfinite
    (tensor(1.), 'bias')
    """

    def __init__(self, names: Sequence[str], flags: torch.Tensor) -> None:
        self._names = names
        self._flags = flags
        self.flag = flags.amax()
        """Above 0 if the gradient is not finite: 0-d, on its device."""

    @cached_property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite, or None; waits for the device."""
        return first_flagged(self._names, self._flags)


Check: TypeAlias = FiniteCheck | DeferredCheck


Conditions: TypeAlias = dict[str, Callable[["Deferral", str], object]]
"""By the sentence that says the reason: tells whether it holds, of an optimizer that steps by its name.

What is true about it stands in the sentence in the place of ``{}``.
"""

READS_CHECK: Final[Conditions] = {
    "on_overflow={!r} decides on the host whether there is another try": lambda run, _: (
        run.on_overflow != "skip" and run.on_overflow
    ),
    "the processes tell each other of every try": lambda run, _: run.num_processes > 1,
    "{}": lambda run, name: cannot_skip(run.training.optimizers[name], run.training.masters.get(name)),
    "a scheduler that counts applied updates counts on the host": lambda run, name: any(
        each.optimizer is run.training.optimizers[name] for each in run.training.schedulers.values()
    ),
}
"""The reasons for which the overflow check is read, in the order in which they are looked for."""

REASONS: Final[Conditions] = READS_CHECK | {
    "{} has no after_on_device of its own": lambda run, _: (
        (policy := run.training.scale.policy).after_on_device is LossScale.after_on_device and policy.__name__
    ),
    "the weight of a Loss is a tensor, which tells whether its shard takes part": lambda run, _: run.reads_weights,
    "the buffer {!r} is no plain run of numbers": lambda run, _: unpackable_buffer(run.training.group.model),
}
"""All reasons for which something is read: those, and others where the check is deferred all the same."""


@dataclass(slots=True)
class Deferral:
    """Decides whether the overflow check of an update is deferred.

    Attributes:
        on_overflow: What follows a gradient that is not finite.
        num_processes: How many processes the run has.
        training: What is trained.
        reads_weights: Whether weights of the last losses were tensors, which the host waited for.
        has_logged: Whether the log says why every update reads its check.
    """

    on_overflow: OnOverflow
    num_processes: int
    training: Training
    reads_weights: bool = False
    has_logged: bool = False

    def reason(self, names: Names, conditions: Conditions = REASONS) -> str | None:
        """Return the first of some reasons that holds for an update; None if none does.

        Args:
            names: The optimizers that step.
            conditions: The reasons to look for.
        """
        for sentence, condition in conditions.items():
            for name in names:
                found = condition(self, name)
                if found:
                    return sentence.format(found)
        return None

    def defers(self, names: Names) -> bool:
        """Return whether the overflow check stays on the device; where it does not, log once why not."""
        reason = self.reason(names, READS_CHECK)
        if reason is not None and not self.has_logged:
            self.has_logged = True
            LOG.info("Every update reads whether its gradient is finite: %s.", reason)
        return reason is None

    def read_if_needed(self, check: Check, names: Names) -> Check:
        """Read a deferred check where these optimizers have come to need it since, such as by a new hook."""
        return check if self.reason(names, READS_CHECK) is None else FiniteCheck(check.nonfinite)
