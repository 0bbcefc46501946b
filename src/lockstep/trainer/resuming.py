"""Resume a trainer from a snapshot."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import StateError
from lockstep.snapshots import Resumption, find, fitting, prepare
from lockstep.updaters import Updater


class Resumable(Protocol):
    """The parts of a trainer that resuming needs."""

    updater: Updater
    out: Path

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""


def resume_from(trainer: Resumable, source: str | Path, accept: Collection[str]) -> Resumption | None:
    """Load a snapshot into a trainer; see `Trainer.run`. After an error nothing of the trainer has changed.

    Args:
        trainer: The trainer.
        source: ``"auto"``, or the folder of a snapshot or of a run.
        accept: The names of fields of the recipe that may differ.

    Returns:
        What was loaded; None if the source is ``"auto"`` and there is no snapshot.

    Raises:
        TypeError: If the source is not a path.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f'`resume` must be "auto", the folder of a snapshot or of a run, or None, got {source!r}.')
    snapshot = find(trainer.updater, source, trainer.out)
    if snapshot is None:
        return None
    # Not by the path of the snapshot, which may be one of another machine.
    same_run = source == "auto" or Path(source).resolve().is_relative_to(trainer.out.resolve())
    resumption = prepare(trainer.updater, snapshot, accept, same_run=same_run)
    if resumption.surroundings is None:
        raise StateError(
            f"Cannot resume a Trainer from {resumption.path}, which was saved without one. Load it into the updater "
            "by lockstep.snapshots.restore."
        )
    with fitting(resumption.path):
        trainer.load_state_dict({**resumption.surroundings, "updater": resumption.updater})
    return resumption
