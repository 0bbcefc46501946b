"""Say for which reason an update looks on the host at what is on the device, if for any."""

from __future__ import annotations

import logging
from dataclasses import replace

from lockstep.communicators import Communicator
from lockstep.precision import LossScale
from lockstep.updaters.attempt import GradientRequest
from lockstep.updaters.commit import Committer
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.names import Names
from lockstep.updaters.recipe import OnOverflow
from lockstep.updaters.training import Training

LOG = logging.getLogger("lockstep")


class Waiting:
    """Decides whether a try is left unread on the device.

    Args:
        on_overflow: What follows a gradient that is not finite.
        communicator: Joins the processes of the run.
        training: What is trained.
        engine: Computes gradients.
        committer: Moves the weights.
    """

    def __init__(
        self,
        on_overflow: OnOverflow,
        communicator: Communicator,
        training: Training,
        engine: GradientEngine,
        committer: Committer,
    ) -> None:
        self._on_overflow = on_overflow
        self._communicator = communicator
        self._training = training
        self._engine = engine
        self._committer = committer
        self._has_told = False

    def why(self) -> str | None:
        """Give the reason why an update reads something; None where it reads nothing."""
        return self._why_read(tuple(self._training.optimizers)) or self._why_all_the_same()

    def deferred(self, request: GradientRequest, names: Names) -> GradientRequest:
        """Return a request whose overflow check stays on the device if that can be; else say once in the log why not."""
        why = self._why_read(names)
        if why is None:
            return replace(request, deferred=True)
        if not self._has_told:
            self._has_told = True
            LOG.info("Every update reads whether its gradient is finite: %s.", why)
        return request

    def _why_read(self, names: Names) -> str | None:
        """Say why the host has to know whether a gradient is finite."""
        if self._on_overflow != "skip":
            return f"on_overflow={self._on_overflow!r} decides on the host whether there is another try"
        if self._communicator.size > 1:
            return "the processes tell each other of every try"
        return self._committer.why_it_waits(names)

    def _why_all_the_same(self) -> str | None:
        """Say what else is read, though the decision is left on the device."""
        policy = self._training.scale.policy
        if policy.after_on_device is LossScale.after_on_device:
            return f"{policy.__name__} has no after_on_device of its own"
        return self._engine.why_it_waits
