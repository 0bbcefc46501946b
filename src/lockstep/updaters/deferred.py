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
from lockstep.replicas.buffers import unpackable
from lockstep.updaters.names import Names
from lockstep.updaters.recipe import OnOverflow
from lockstep.updaters.training import Training

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


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for which an update reads on the host what is on the device.

    Attributes:
        sentence: The reason, with what `find` returned in the place of ``{}``.
        find: Called with the `Deferral` and the name of an optimizer that steps; true where the reason holds.
        reads_check: Whether it is the overflow check that is read; else that is deferred all the same.
    """

    sentence: str
    find: Callable[[Deferral, str], object]
    reads_check: bool = True


class Deferral:
    """Decides whether the overflow check of an update is deferred.

    Args:
        on_overflow: What follows a gradient that is not finite.
        num_processes: How many processes the run has.
        training: What is trained.

    Attributes:
        reads_weights: Whether weights of the last losses were tensors, which the host waited for.
    """

    def __init__(self, on_overflow: OnOverflow, num_processes: int, training: Training) -> None:
        self.on_overflow = on_overflow
        self.num_processes = num_processes
        self.training = training
        self.reads_weights = False
        self._has_logged = False

    def reason(self, names: Names, *, reads_check: bool = False) -> str | None:
        """Return the first reason for which an update reads something; None where it reads nothing.

        Args:
            names: The optimizers that step.
            reads_check: Whether only reasons count for which the overflow check is read.
        """
        for reason in REASONS:
            if reason.reads_check or not reads_check:
                for name in names:
                    found = reason.find(self, name)
                    if found:
                        return reason.sentence.format(found)
        return None

    def defers(self, names: Names) -> bool:
        """Return whether the overflow check stays on the device; where it does not, log once why not."""
        reason = self.reason(names, reads_check=True)
        if reason is not None and not self._has_logged:
            self._has_logged = True
            LOG.info("Every update reads whether its gradient is finite: %s.", reason)
        return reason is None

    def read_if_needed(self, check: Check, names: Names) -> Check:
        """Read a deferred check where these optimizers have come to need it since, such as by a new hook."""
        return check if self.reason(names, reads_check=True) is None else FiniteCheck(check.nonfinite)


REASONS: Final = (
    Reason(
        "on_overflow={!r} decides on the host whether there is another try",
        lambda run, _: run.on_overflow != "skip" and run.on_overflow,
    ),
    Reason("the processes tell each other of every try", lambda run, _: run.num_processes > 1),
    Reason(
        "{}",
        lambda run, name: cannot_skip(run.training.optimizers[name], run.training.masters.get(name)),
    ),
    Reason(
        "a scheduler that counts applied updates counts on the host",
        lambda run, name: any(
            scheduler.optimizer is run.training.optimizers[name]
            for scheduler in run.training.schedulers.values()
        ),
    ),
    Reason(
        "{} has no after_on_device of its own",
        lambda run, _: (
            (policy := run.training.scale.policy).after_on_device is LossScale.after_on_device
            and policy.__name__
        ),
        reads_check=False,
    ),
    Reason(
        "the weight of a Loss is a tensor, which tells whether its shard takes part",
        lambda run, _: run.reads_weights,
        reads_check=False,
    ),
    Reason(
        "the buffer {!r} is no plain run of numbers",
        lambda run, _: unpackable(run.training.group.model),
        reads_check=False,
    ),
)
"""All reasons, in the order in which they are looked for."""
