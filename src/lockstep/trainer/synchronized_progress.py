"""A view of a run that is equal on all ranks, for triggers."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from lockstep.metrics import Observed
from lockstep.triggers import Progress
from lockstep.updaters import Updater


class SynchronizedProgress:
    """A run as seen by triggers on several ranks: its clock is that of rank 0, read once per iteration.

    Everything else that a trigger reads is equal on all ranks anyway. All ranks therefore act at the same
    iterations, and no rank waits for one that does not act.

    Args:
        run: The run on this rank.
    """

    def __init__(self, run: Progress) -> None:
        self._run = run
        self._read_at = -1
        self._elapsed = 0.0

    @property
    def updater(self) -> Updater:
        """The updater, which runs and counts the updates."""
        return self._run.updater

    @property
    def observation(self) -> Mapping[str, Observed]:
        """The values observed in the current iteration."""
        return self._run.observation

    @property
    def elapsed_time(self) -> float:
        """The duration of the run in seconds on rank 0, which is exchanged once per iteration."""
        # Once, whether one trigger asks or several: all ranks must take part in an exchange equally often, and
        # within an iteration every trigger must see the same time.
        if self._read_at != self.updater.iteration:
            clocks = self.updater.communicator.exchange(struct.pack("<d", self._run.elapsed_time))
            (self._elapsed,) = struct.unpack("<d", clocks[0])
            self._read_at = self.updater.iteration
        return self._elapsed
