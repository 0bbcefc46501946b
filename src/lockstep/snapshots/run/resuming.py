"""Find a snapshot, check that it fits, and prepare its state for loading."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.communicators import kernel_class
from lockstep.errors import SnapshotError
from lockstep.snapshots.format import DAMAGED, FOLDER, Parent
from lockstep.snapshots.reading import Snapshot, load, newest_whole
from lockstep.snapshots.run.ranks import agree
from lockstep.snapshots.run.recipe import check_kernels, check_recipe
from lockstep.snapshots.run.restore import updater_state
from lockstep.updaters import Updater


@dataclass(frozen=True)
class Resumption:
    """A snapshot that a run resumes from, and the state to load.

    Attributes:
        path: The folder of the snapshot.
        run_id: The name of the run that wrote it.
        update: The update after which it was written.
        parent: The snapshot from which that run was resumed.
        accepted: The names of the fields of the recipe that differ.
        same_kernels: Whether this process has the kernels of the snapshot.
        same_run: Whether the run continues in the folder of the snapshot, under the same name.
        updater: The state for the updater.
        surroundings: The state for the trainer; None if the snapshot was saved without one.
    """

    path: Path
    run_id: str
    update: int
    parent: Parent | None
    accepted: tuple[str, ...]
    same_kernels: bool
    same_run: bool
    updater: dict[str, Any] = field(repr=False)
    surroundings: dict[str, Any] | None = field(repr=False)

    @property
    def source(self) -> Parent:
        """The snapshot, as snapshots of a run that continues from it name it."""
        return Parent(self.run_id, self.update)


def find(updater: Updater, source: str | Path, out: Path, *, argument: str = "resume") -> Snapshot | None:
    """Find the snapshot to resume from, the same one on all ranks. Every rank must call this.

    Args:
        updater: The updater of the run.
        source: ``"auto"`` for the newest whole snapshot in `out`, if there is one; or the folder of a snapshot, or of
            a run of which the newest one is used.
        out: The folder of the run.
        argument: The name of the argument that `source` is, for the error.

    Raises:
        SnapshotError: If there is no whole snapshot although there should be one.
    """

    def read() -> Snapshot | None:
        path = out if source == "auto" else Path(source)
        if source != "auto" and not (path / FOLDER).is_dir():
            return load(path)
        newest = newest_whole(path)
        damaged = sorted(each.name for each in (path / FOLDER).glob(f"{DAMAGED}*"))
        if newest is None and damaged:
            # They were renamed by an earlier attempt, which must not make the next one start anew.
            raise SnapshotError(
                f"No snapshot in {path / FOLDER} is whole: {', '.join(damaged)}. Remove them to start anew."
            )
        return newest

    found = agree(updater.communicator, read)
    if found is None and source != "auto":
        raise SnapshotError(f"`{argument}` must name a snapshot or a run that has one, got {source}.")
    return found


def prepare(
    updater: Updater, snapshot: Snapshot, accept: Collection[str] = (), *, same_run: bool = False
) -> Resumption:
    """Check that a snapshot fits an updater, and return the state to load. Nothing of the updater changes.

    Args:
        updater: The updater that is to continue.
        snapshot: The snapshot.
        accept: The names of fields of the recipe that may differ. The run continues with its own values of them.
        same_run: Whether the run continues in the folder of the snapshot.

    Raises:
        StateError: If other fields differ.
        ValueError: If `accept` names something that is no field.
    """
    changes = check_recipe(snapshot.path, snapshot.recipe, updater.recipe_fields(), accept)
    return Resumption(
        path=snapshot.path,
        run_id=snapshot.run_id,
        update=snapshot.update,
        parent=snapshot.parent,
        accepted=tuple(each.name for each in changes),
        same_run=same_run,
        same_kernels=check_kernels(snapshot.path, snapshot.kernel_class, kernel_class(updater.devices)),
        updater=updater_state(snapshot, updater, changes),
        surroundings=snapshot.surroundings(),
    )
