"""Write the snapshots of a run while training goes on."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, get_native_id
from types import TracebackType
from typing import Any, Final

from lockstep.errors import OrderError, SnapshotError, SnapshotWarning
from lockstep.snapshots.format import FOLDER, TEMPORARY, Content, Manifest, Parent
from lockstep.snapshots.reading import list_snapshots
from lockstep.snapshots.writing.commit import remove, remove_durably, write_snapshot
from lockstep.snapshots.writing.disk import Disk
from lockstep.snapshots.writing.folder import Staged
from lockstep.snapshots.writing.lock import FolderLock
from lockstep.snapshots.writing.repeated import repeats
from lockstep.snapshots.writing.retention import Retention, kept
from lockstep.snapshots.writing.staging import Buffers, Constants, freeze_content

FAILURES: Final = 3
"""Failed attempts in a row after which a required snapshot raises."""

NICENESS: Final = 10
"""By how much the priority of the thread that writes is lower than that of training.

With a snapshot every 10 updates of 2 million parameters and both of two cores busy, it makes training about 8 % slower
instead of 12 % (`benchmarks/snapshots.py`).
"""


@dataclass(frozen=True, eq=False)
class _Job:
    """A copied snapshot that is to be written.

    Attributes:
        staged: The snapshot.
        buffers: The buffers that hold its tensors.
        must: Whether a newer one may not replace it.
    """

    staged: Staged
    buffers: Buffers
    must: bool


class SnapshotWriter:
    """Writes the snapshots of a run in a thread.

    One snapshot can be written while another one waits. A newer one replaces the one that waits, so that training never
    waits for the disk, except for snapshots that must be written. Methods are to be called from one thread.

    Args:
        out: The folder of the run.
        run_id: The name of the run. Only snapshots of this run are ever removed.
        parent: The snapshot from which the run was resumed, if it has another run's name.
        keep: The number of newest snapshots to keep, at least 1. While one is written there is one more.
        best: The metric by which one more snapshot is kept; None for no such snapshot.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is the best one.
        required: Whether three failed attempts in a row, or a failed last one, raise instead of only warning.
        about: JSON values about the machine, which are never read back.
        disk: The calls of the operating system.

    Attributes:
        replaced: The number of snapshots that were not written because a newer or more important one was.
        newest: The folder of the snapshot that was written last, or None.

    Raises:
        SnapshotError: If another process writes to the folder, or it holds snapshots of another run.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        run_id: str,
        parent: Parent | None = None,
        keep: int = 3,
        best: str | None = None,
        mode: str = "max",
        required: bool = False,
        about: Mapping[str, Any] | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._retention = Retention(keep=keep, best=best, mode=mode)
        self._folder = Path(out) / FOLDER
        self._run_id, self._required = run_id, required
        self._about = about or {}
        self._disk = disk or Disk()
        self.replaced = 0
        self.newest: Path | None = None

        # Python ends only after the thread of an executor has finished, so a snapshot is durable then.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep-snapshots", initializer=_lower_priority)
        # The thread and its callers share what follows, under this condition.
        self._changed = Condition()
        self._writing: Future[None] | None = None
        self._jobs: deque[_Job] = deque()
        self._free = [Buffers(), Buffers()]
        self._constants: Constants = {}
        self._messages: list[str] = []
        self._failures = 0
        self._error: BaseException | None = None

        _create(self._disk, self._folder)
        self._lock: FolderLock | None = FolderLock(self._folder)
        try:
            manifests = self._survey(Path(out), parent)
        except BaseException:
            self._lock.close()
            raise
        self._kept = [kept(path, manifest) for path, manifest in manifests]
        self._previous: Manifest | None = manifests[-1][1] if manifests else None
        self._is_unchanged_reported = False

    def save(self, content: Content, *, reasons: Iterable[str] = (), must: bool = False) -> None:
        """Copy a content and write it in the background.

        Args:
            content: The content. When this returns, its tensors may change.
            reasons: Why the snapshot is written.
            must: Whether it is written in any case. Otherwise it may be replaced by a newer one while it waits. If two
                that must be written are under way, this waits for the first one.

        Raises:
            TypeError: If the content holds something that a snapshot cannot hold.
            ValueError: If the content is not of this run.
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        if self._lock is None:
            raise OrderError("`save` must be called before `close`.")
        if content.run_id != self._run_id:
            raise ValueError(f"`content.run_id` must be {self._run_id!r}, got {content.run_id!r}.")
        # While the thread writes, it could help only after that. Otherwise all buffers are free.
        started = self._free[-1] if self._writing is None else None
        if started is not None:
            started.start(self._executor)
        try:
            # Before anything that waits could be replaced, so that a content that is refused replaces nothing.
            frozen = freeze_content(content, self._constants)
            self._report(FAILURES)
            buffers = self._acquire(must)
        except BaseException:
            if started is not None:
                started.stop()
            raise
        if buffers is None:
            return
        try:
            copies = buffers.copy(frozen.memory)
        except BaseException:
            buffers.stop()
            with self._changed:
                self._free.append(buffers)
            raise
        staged = Staged(frozen=frozen, copies=copies, reasons=tuple(reasons), about=self._about)
        with self._changed:
            self._jobs.append(_Job(staged, buffers, must))
            if self._writing is None:
                self._writing = self._executor.submit(self._write_all)

    def wait(self) -> None:
        """Wait until every snapshot is written.

        Raises:
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        self._join()
        self._report(FAILURES)

    def close(self) -> None:
        """Wait until every snapshot is written, and release the folder. Further calls do nothing.

        Raises:
            SnapshotError: If snapshots are required and the last one could not be written.
        """
        if self._lock is not None:
            self._join()
            self._executor.shutdown()
            self._lock.close()
            self._lock = None
            self._report(1)

    def on_durable(self, manifest: Manifest) -> None:
        """Run after a snapshot has become durable, in the thread that writes. Subclasses may override it.

        Args:
            manifest: The manifest of the snapshot.
        """

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _survey(self, out: Path, parent: Parent | None) -> list[tuple[Path, Manifest]]:
        """Remove what an interrupted process has left, and return the manifests of this run in ascending order."""
        try:
            remove(self._disk, [path for path in self._folder.iterdir() if path.name.startswith(TEMPORARY)])
        except OSError as error:
            warnings.warn(f"Unfinished snapshots could not be removed: {error}.", SnapshotWarning, stacklevel=3)
        found = [(each.path, each.manifest) for each in list_snapshots(out) if each.manifest is not None]
        for path, manifest in found:
            inherited = parent is not None and manifest.run_id == parent.run_id and manifest.update <= parent.update
            if manifest.run_id != self._run_id and not inherited:
                # If both runs wrote here, the newest snapshot would be that of the longer run.
                raise SnapshotError(
                    f"{path} is a snapshot of another run, {manifest.run_id!r}, and this run is {self._run_id!r}. "
                    "Resume that run, choose another `out`, or move its snapshots to another folder."
                )
        return [each for each in found if each[1].run_id == self._run_id]

    def _acquire(self, must: bool) -> Buffers | None:
        """Return buffers for a copy, or None if those that wait are more important than it."""
        with self._changed:
            while not self._free:
                # Both buffers are in use, so at least one snapshot waits.
                replaceable = next((job for job in self._jobs if not job.must), None)
                if replaceable is not None:
                    self.replaced += 1
                    self._jobs.remove(replaceable)
                    return replaceable.buffers
                if not must:
                    self.replaced += 1
                    return None
                self._changed.wait()
            return self._free.pop()

    def _join(self) -> None:
        while (writing := self._writing) is not None:
            writing.result()

    def _report(self, failures: int) -> None:
        """Warn of what went wrong since the last call, and raise if that is too much.

        Args:
            failures: The number of failed attempts in a row from which on it is an error, if snapshots are required.
        """
        with self._changed:
            messages, self._messages = self._messages, []
            error, self._error = self._error, None
            failed = self._failures
        for message in messages:
            warnings.warn(message, SnapshotWarning, stacklevel=3)
        if error is not None:
            raise error
        if self._required and failed >= failures:
            raise SnapshotError(f"The last {failed} attempts to write a snapshot to {self._folder} have failed.")

    def _write_all(self) -> None:
        """Write what waits until nothing does."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._writing = None
                    return
                job = self._jobs.popleft()
            messages, error = list[str](), None
            try:
                messages = self._write(job.staged)
            except BaseException as raised:  # noqa: BLE001 - raised again by the next call
                error = raised
            with self._changed:
                self._free.append(job.buffers)
                self._messages += messages
                self._error = self._error or error
                self._changed.notify_all()

    def _write(self, staged: Staged) -> list[str]:
        """Write one snapshot and remove old ones. Return what went wrong."""
        try:
            path, manifest = write_snapshot(self._disk, self._folder, staged)
        except (OSError, SnapshotError) as error:
            self._failures += 1
            message = (
                f"The snapshot of update {staged.frozen.update} could not be written to {self._folder}, and the "
                f"earlier ones are kept: {error} It needs about {staged.bytes} bytes, and "
                f"{_free_bytes(self._folder)} are free."
            )
            return [message]
        self._failures = 0
        problems = [] if self._previous is None else self._unchanged(self._previous, manifest)
        self._previous, self.newest = manifest, path
        newest = kept(path, manifest)
        self._kept = [each for each in self._kept if each.path != path] + [newest]
        # Before older ones are removed, because that may fail.
        self.on_durable(manifest)
        removable = self._retention.removable(self._kept, newest)
        try:
            remove_durably(self._disk, [each.path for each in removable if each.path.exists()])
        except OSError as error:
            problems.append(f"Old snapshots in {self._folder} could not be removed: {error}.")
        else:
            self._kept = [each for each in self._kept if each not in removable]
        return problems

    def _unchanged(self, before: Manifest, manifest: Manifest) -> list[str]:
        """Return once if no tensor has changed though updates were applied: a copy of old memory looks like that."""
        if self._is_unchanged_reported or not repeats(before, manifest):
            return []
        self._is_unchanged_reported = True
        message = (
            f"No tensor of the snapshot of update {manifest.update} differs from that of update {before.update}, "
            "although updates were applied in between. It is written, and is right if no weight was trained or every "
            "gradient was zero. Otherwise it repeats an old state; please report it."
        )
        return [message]


def _free_bytes(folder: Path) -> int | str:
    try:
        status = os.statvfs(folder)
    except OSError:
        # The folder is gone, or its disk: then writing has failed for that reason, which the message has.
        return "an unknown number"
    return status.f_bavail * status.f_frsize


def _create(disk: Disk, folder: Path) -> None:
    """Create a folder with its parents, durably."""
    if not folder.is_dir():
        _create(disk, folder.parent)
        try:
            disk.create_folder(folder)
        except FileExistsError:
            # Another rank was faster.
            if not folder.is_dir():
                raise
        disk.sync_folder(folder.parent)


def _lower_priority() -> None:
    """Lower the priority of the calling thread below that of training, on Linux, where each thread has its own.

    Hashing takes a core for about a millisecond per megabyte. A thread of training that waits for the interpreter's
    lock while this one holds it leaves its core to this one. Only other programs that keep all cores busy may delay
    both.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
