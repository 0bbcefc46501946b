"""Trials: a few updates and one call of each extension, which leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from lockstep.communicators import Communicator
from lockstep.integers import check_integer


def trial_updates(fast_dev_run: bool | int) -> int:
    """Return the number of updates of a trial; 0 for none.

    Args:
        fast_dev_run: The argument of `Trainer`.

    Raises:
        TypeError: If it is neither a bool nor an integer.
        ValueError: If it is negative.
    """
    if isinstance(fast_dev_run, bool):
        return int(fast_dev_run)
    check_integer("fast_dev_run", fast_dev_run, minimum=0)
    return fast_dev_run


def trial_folder(communicator: Communicator, owner: object) -> Path:
    """Return a temporary folder, with one name on all ranks, which is removed with its owner. Every rank calls this.

    Args:
        communicator: The communicator of the run.
        owner: The object with which the folder goes.
    """
    own = tempfile.mkdtemp(prefix="lockstep-trial-") if communicator.rank == 0 else ""
    out = Path(own if communicator.size == 1 else communicator.exchange(own.encode())[0].decode())
    weakref.finalize(owner, shutil.rmtree, out, ignore_errors=True)
    return out
