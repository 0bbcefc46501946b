"""Let the triggers of all ranks see the same run."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from lockstep.metrics import Observed
from lockstep.triggers import Progress
from lockstep.updaters import Updater


class AgreedProgress:
    """A run as triggers see it: its clock is that of rank 0, read once in an iteration.

    Everything else that a trigger sees is the same on every rank anyway. So all ranks act at the same
    iterations, and nobody waits for one that does not come.

    Args:
        run: This rank's.
    """

    def __init__(self, run: Progress) -> None:
        self._run = run
        self._read_at = -1
        self._elapsed = 0.0

    @property
    def updater(self) -> Updater:
        """Who makes the updates."""
        return self._run.updater

    @property
    def observation(self) -> Mapping[str, Observed]:
        """What was observed."""
        return self._run.observation

    @property
    def elapsed_time(self) -> float:
        """The seconds that the run has taken on rank 0, which tells all ranks once in an iteration."""
        if self._read_at != self.updater.iteration:
            clocks = self.updater.communicator.exchange(struct.pack("<d", self._run.elapsed_time))
            (self._elapsed,) = struct.unpack("<d", clocks[0])
            self._read_at = self.updater.iteration
        return self._elapsed
