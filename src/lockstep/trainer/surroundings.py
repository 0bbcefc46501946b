"""What surrounds the loop of a trainer: a time that ranks share, errors while a run ends, the folder of a trial."""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path

from lockstep.communicators import Communicator
from lockstep.metrics import Observed
from lockstep.triggers import Progress


class SynchronizedProgress:
    """A run as seen by triggers on several ranks: its clock is that of rank 0, read once per iteration.

    Everything else that a trigger reads is equal on all ranks anyway. All ranks therefore act at the same
    iterations, and no rank waits for one that does not act.

    Args:
        run: The run on this rank.
    """

    def __init__(self, run: Progress) -> None:
        self._run, self.updater = run, run.updater
        self._read_at = -1
        self._elapsed = 0.0

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
            self._elapsed = self.updater.communicator.exchange_json(self._run.elapsed_time)[0]
            self._read_at = self.updater.iteration
        return self._elapsed


def report_failure(what: str, failure: BaseException, *, original: BaseException) -> None:
    """Print to stderr that something failed while the run was ending, and add a note to the original exception."""
    lines = traceback.format_exception(type(failure), failure, failure.__traceback__, chain=False)
    sys.stderr.write(f"{what} raised while the run ended with {type(original).__name__}:\n{''.join(lines)}")
    if sys.version_info >= (3, 11):
        original.add_note(f"{what} raised, too: {lines[-1].strip()}")


def say(message: str) -> None:
    """Print to stderr what a user in front of a terminal, or who reads the log of a job, should know of the run.

    Args:
        message: The sentences.
    """
    sys.stderr.write(f"lockstep: {message}\n")


def trial_folder(communicator: Communicator, owner: object) -> Path:
    """Return a temporary folder, with one name on all ranks, which is removed with its owner. Every rank calls this.

    Args:
        communicator: The communicator of the run.
        owner: The object with which the folder goes.
    """
    own = tempfile.mkdtemp(prefix="lockstep-trial-") if communicator.rank == 0 else ""
    out = Path(communicator.exchange_json(own)[0])
    weakref.finalize(owner, shutil.rmtree, out, ignore_errors=True)
    return out
