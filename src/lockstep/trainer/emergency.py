"""The snapshot at the end of a run, which a signal or the loss of another rank may have ended."""

from __future__ import annotations

import warnings
from typing import Any

from lockstep import snapshots
from lockstep.errors import PeerError, SignalExit, SnapshotError, SnapshotWarning, WorkerError
from lockstep.trainer.trainer import Trainer
from lockstep.updaters import Updater


def reason_of(error: BaseException | None, updater: Updater) -> str | None:
    """Return why a snapshot is written at the end of a run.

    Args:
        error: The exception that ends the run, if there is one.
        updater: The updater of the run.

    Returns:
        The reason for the manifest; None if the state may be in the middle of something, or partly on a rank that is
        lost, so that it is not written.
    """
    if error is None:
        return "end of the run"
    if isinstance(error, SignalExit):
        return f"signal {error.name}"
    # The exchange that failed comes before anything changes, and so does a wait for data, so that the state is that of
    # the last finished update.
    if updater.shares_state or not isinstance(error, PeerError | WorkerError):
        return None
    return f"emergency snapshot of rank {updater.communicator.rank}"


def any_rank(updater: Updater, holds: bool) -> bool:
    """Return whether something holds on any rank, where all of them must then collect the state together.

    Args:
        updater: The updater of the run.
        holds: Whether it holds on this rank.
    """
    if not updater.shares_state:
        return holds
    return b"1" in updater.communicator.exchange(b"1" if holds else b"0")


def write_emergency(trainer: Trainer, collector: snapshots.Collector, about: dict[str, Any]) -> None:
    """Write the state of the last finished update on a rank that writes no other snapshots.

    Args:
        trainer: The trainer, whose run ends because another rank is lost.
        collector: Collects the state of its updater.
        about: JSON values about the machine.
    """
    updater = trainer.updater
    if updater.iteration == 0 or updater.shares_state:
        return
    # Also after no update of its own: the machine that had the snapshot and sent it may be the one that is lost.
    reason = f"emergency snapshot of rank {updater.communicator.rank}"
    try:
        content = collector.collect(surroundings=trainer.surroundings())
        snapshots.write_beside(trainer.out, content, reasons=[reason], about=about)
    except (OSError, SnapshotError) as failure:
        # The loss of the rank stays the error that ends this process.
        message = f"The emergency snapshot of update {updater.iteration} could not be written: {failure}"
        warnings.warn(message, SnapshotWarning, stacklevel=3)


def wait_for_writers(trainer: Trainer) -> PeerError | None:
    """Wait until every rank has come here, so that no rank ends while another one still writes.

    A launcher takes the first process that ends for a failure, and ends the others.

    Args:
        trainer: The trainer, whose run ends because of a signal.

    Returns:
        The error if a rank has not come.
    """
    communicator = trainer.updater.communicator
    if communicator.size == 1:
        return None
    try:
        communicator.exchange(b"")
    except PeerError as error:
        return error
    return None
