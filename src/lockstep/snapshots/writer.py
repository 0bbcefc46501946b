"""Write the snapshots of a run in a thread while training goes on, and remove old ones."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import get_native_id
from typing import Any, Final, NamedTuple

import torch

from lockstep.arguments import check_choice, check_integer
from lockstep.errors import OrderError, SnapshotError, SnapshotWarning, warn
from lockstep.side_files import kind_of
from lockstep.snapshots.commit import Buffers, Staged, describe, stage, write_now, write_snapshot
from lockstep.snapshots.content import FOLDER, TEMPORARY, UNVERIFIED, VERIFIED, Content, folder_name
from lockstep.snapshots.digests import Record, record_of
from lockstep.snapshots.disk import Disk, FolderLock, create, discard, remove, set_aside, snapshots_in, write_file
from lockstep.snapshots.snapshot import list_snapshots

NICENESS: Final = 10
"""By how much the priority of the thread that writes is lower than that of training.

With a snapshot every 10 updates of 2 million parameters and both of two cores busy, it makes training about 8 % slower
instead of 12 % (`benchmarks/snapshots.py`).
"""


class _Job(NamedTuple):
    """Something that the thread does or will do.

    Attributes:
        future: Its result, which is what went wrong.
        buffers: The buffers with the copy of a state; None if it needs none.
        must: Whether a newer state may not replace it.
    """

    future: Future[list[str]]
    buffers: Buffers | None
    must: bool


class Digester(AbstractContextManager[Any]):
    """Computes the digests of states in a thread, to compare them with those that other ranks have written.

    Each state is copied. One can be processed while another one waits. A newer one replaces the one that waits, so that
    training never waits, except for those that must be processed. Methods are to be called from one thread.

    Args:
        run_id: The name of the run.

    Attributes:
        replaced: The number of states that were not processed because a newer or more important one was.
        records: The digests of the states that it has processed.
        newest_update: The update of the newest of them; None if there is none.
    """

    newest_update: int | None = None

    def __init__(self, run_id: str) -> None:
        self.replaced = 0
        self.records: SimpleQueue[Record] = SimpleQueue()
        self._run_id = run_id
        # Python ends only after the thread of an executor has finished, so a snapshot is durable then.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep-snapshots", initializer=_lower_priority)
        self._closed = False
        self._buffers = (Buffers(), Buffers())
        self._jobs: list[_Job] = []

    def save(self, content: Content, *, reasons: Iterable[str] = (), must: bool = False) -> None:
        """Copy a content and process it in the background.

        Args:
            content: The content. When this returns, its tensors may change.
            reasons: Why the snapshot is written.
            must: Whether it is processed in any case. Otherwise it may be replaced by a newer one while it waits. If
                two that must be processed are under way, this waits for the first one.

        Raises:
            TypeError: If the content holds something that a snapshot cannot hold.
            ValueError: If the content is not of this run.
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        if self._closed:
            raise OrderError("`save` must be called before `close`.")
        if content.run_id != self._run_id:
            raise ValueError(f"`content.run_id` must be {self._run_id!r}, got {content.run_id!r}.")
        # Before anything that waits could be replaced, so that a content that is refused replaces nothing.
        staged = stage(content, reasons)
        self.report()
        buffers = self._acquire(must=must)
        if buffers is not None:
            self._do(partial(self.process, staged, buffers.copy(staged.tensors)), buffers, must=must)

    def wait(self) -> None:
        """Wait until every state is processed.

        Raises:
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        wait([job.future for job in self._jobs])
        self.report()

    def close(self) -> None:
        """Wait until every state is processed, and end the thread. Further calls do nothing."""
        if not self._closed:
            self._executor.shutdown()
            self._closed = True
            self.report()

    def take_records(self) -> list[Record]:
        """Return the digests that have been computed since the last call."""
        # Only this thread takes any out, so there are at least as many as the queue says.
        return [self.records.get() for _ in range(self.records.qsize())]

    def report(self) -> None:
        """Warn of what went wrong since the last call, and raise what the thread has raised."""
        # One thread does them in this order.
        while self._jobs and self._jobs[0].future.done():
            for message in self._jobs.pop(0).future.result():
                warn(message, SnapshotWarning)

    def process(self, staged: Staged, copies: Sequence[torch.Tensor]) -> list[str]:
        """Process one state in the thread, and return what went wrong.

        Args:
            staged: The state.
            copies: The copies of its tensors.
        """
        self.records.put(record_of(describe(staged, copies)))
        self.newest_update = staged.update
        return []

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, action: Callable[[], list[str]], buffers: Buffers | None = None, *, must: bool = True) -> None:
        """Have the thread do something after all that it has been told before."""
        self._jobs.append(_Job(self._executor.submit(action), buffers, must))

    def _acquire(self, *, must: bool) -> Buffers | None:
        """Return buffers for a copy, or None if those that wait are more important than it."""
        while True:
            busy = [job for job in self._jobs if not job.future.done()]
            free = [each for each in self._buffers if each not in [job.buffers for job in busy]]
            if free:
                return free[0]
            # Both buffers are in use, so at least one state waits, which can still be cancelled.
            replaced = next((job for job in busy if not job.must and job.future.cancel()), None)
            if replaced is None and (must or any(job.future.done() for job in busy)):
                wait([job.future for job in busy], return_when=FIRST_COMPLETED)
                continue
            self.replaced += 1
            if replaced is None:
                return None
            self._jobs.remove(replaced)


@dataclass(frozen=True)
class Kept:
    """What is known of a snapshot for deciding about it.

    Attributes:
        path: The folder.
        update: The number of updates.
        metrics: Numbers that describe the snapshot.
        ranks: The number of ranks that had the same bits; 0 if they have not compared them.
    """

    path: Path
    update: int
    metrics: Mapping[str, float]
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which snapshots are kept.

    Attributes:
        keep: The number of newest snapshots to keep, at least 1.
        best: The metric by which one more snapshot is kept; None for no such snapshot.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is the best one.
    """

    keep: int = 3
    best: str | None = None
    mode: str = "max"

    def __post_init__(self) -> None:
        check_integer("keep", self.keep, minimum=1)
        check_choice("mode", self.mode, ("max", "min"))

    def removable(self, found: Iterable[Kept], newest: Kept) -> list[Kept]:
        """Return the snapshots that are neither among the newest nor the best one nor the last one ranks agreed on.

        Args:
            found: The snapshots of the run.
            newest: The snapshot that was written last, which is kept in any case.

        >>> found = [Kept(Path(str(update)), update, {"a": -update}, int(update == 1)) for update in range(5)]
        >>> [each.update for each in Retention(keep=2, best="a").removable(found, found[4])]
        [2]
        """
        ordered = sorted(found, key=lambda each: each.update)
        staying = [newest, *ordered[-self.keep :], *[each for each in ordered if each.ranks][-1:]]
        best: Kept | None = None
        for each in ordered:
            if self.is_better(each.metrics, None if best is None else best.metrics):
                best = each
        return [each for each in ordered if each not in staying and each is not best]

    def is_better(self, metrics: Mapping[str, float], than: Mapping[str, float] | None) -> bool:
        """Return whether one snapshot is better than another; of equal values, the first one stays the best.

        Args:
            metrics: The numbers that describe the snapshot. It is never better without a number for `best`.
            than: Those of the best one so far; None if there is none.

        >>> Retention(best="a").is_better({"a": 2.0}, {"a": 1.0}), Retention(best="a").is_better({"a": 1.0}, {"a": 1.0})
        (True, False)
        """
        if self.best is None or math.isnan(value := metrics.get(self.best, math.nan)):
            return False
        if than is None:
            return True
        return value > than[self.best] if self.mode == "max" else value < than[self.best]


FAILURES: Final = 3
"""Failed attempts in a row after which a required snapshot raises."""


class SnapshotWriter(Digester):
    """Writes the snapshots of a run in a thread, and computes their digests.

    One snapshot can be written while another one waits. A newer one replaces the one that waits, so that training never
    waits for the disk, except for snapshots that must be written. Methods are to be called from one thread.

    Args:
        out: The folder of the run.
        run_id: The name of the run. Only snapshots of this run are ever removed.
        keep: The number of newest snapshots to keep, at least 1. While one is written there is one more. The last one
            that ranks have agreed on is kept as well.
        best: The metric by which one more snapshot is kept; None for no such snapshot.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is the best one.
        required: Whether three failed attempts in a row, or a failed last one, raise instead of only warning.
        about: JSON values about the machine and the program, which are in no digest.
        disk: The calls of the operating system.

    Attributes:
        replaced: The number of snapshots that were not written because a newer or more important one was.
        newest: The folder of the snapshot that was written last, or None.

    Raises:
        SnapshotError: If another process writes to the folder, or it is a link.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        run_id: str,
        keep: int = 3,
        best: str | None = None,
        mode: str = "max",
        required: bool = False,
        about: Mapping[str, Any] | None = None,
        disk: Disk | None = None,
    ) -> None:
        super().__init__(run_id)
        self._retention = Retention(keep=keep, best=best, mode=mode)
        self._folder = snapshots_in(Path(out)) or Path(out) / FOLDER
        self._required = required
        self._about = about or {}
        self._disk = disk or Disk()
        self.newest: Path | None = None
        self._failures = 0
        create(self._disk, self._folder)
        self._lock = FolderLock(self._folder)
        try:
            self._kept = self._survey(Path(out))
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Wait until every snapshot is written, and release the folder. Further calls do nothing.

        Raises:
            SnapshotError: If snapshots are required and the last one could not be written.
        """
        try:
            super().close()
        finally:
            self._lock.close()

    def report(self) -> None:
        """Warn of what went wrong since the last call.

        Raises:
            SnapshotError: If snapshots are required and the last three attempts have failed, or at the end the last.
        """
        super().report()
        if self._required and self._failures >= (1 if self._closed else FAILURES):
            raise SnapshotError(
                f"The last {self._failures} attempts to write a snapshot to {self._folder} have failed."
            )

    def mark_verified(self, update: int, digest: str, ranks: int) -> None:
        """Record in the background that ranks have the bits of a snapshot, if it is there.

        Args:
            update: The number of updates.
            digest: The digest of the training state.
            ranks: The number of ranks.
        """
        self._do(partial(self._mark, update, json.dumps({"digest": digest, "ranks": ranks}).encode(), ranks))

    def set_unverified_aside(self, since: int) -> list[Path]:
        """Rename the snapshots after the last one that ranks have agreed on, and return their new names.

        Args:
            since: The update of the snapshot from which the run was resumed, which all ranks have read; it and those
                before it stay.

        Raises:
            OSError: If a call fails.
        """
        return self._executor.submit(self._set_aside, since).result()

    def process(self, staged: Staged, copies: Sequence[torch.Tensor]) -> list[str]:
        """Write one snapshot and remove old ones. Return what went wrong."""
        problems: list[str] = []
        try:
            if not self._lock.is_in_place:
                self._come_back()
                problems.append(
                    f"{self._folder} was removed or moved. A new one is there, with this and later snapshots."
                )
            path = self._folder / folder_name(staged.update)
            manifest = write_snapshot(self._disk, path, staged, copies, self._about)
        except (OSError, SnapshotError) as error:
            self._failures += 1
            needed = sum(copy.nbytes for copy in copies)
            message = (
                f"The snapshot of update {staged.update} could not be written to {self._folder}, and the earlier ones "
                f"are kept: {error} It needs about {needed} bytes, and {_free_bytes(self._folder)} are free."
            )
            return [*problems, message]
        self._failures = 0
        self.newest, self.newest_update = path, manifest.update
        newest = Kept(path, manifest.update, manifest.metrics)
        self._kept[newest.update] = newest
        # Before older ones are removed, because that may fail.
        self.records.put(record_of(manifest))
        for each in self._retention.removable(self._kept.values(), newest):
            try:
                discard(self._disk, each.path)
            except (OSError, SnapshotError) as error:
                problems.append(f"Old snapshots in {self._folder} could not be removed: {error}.")
                if isinstance(error, OSError):
                    break
            del self._kept[each.update]
        return problems

    def _come_back(self) -> None:
        """Create the folder again, and lock it."""
        create(self._disk, self._folder)
        lock = FolderLock(self._folder)
        self._lock.close()
        self._lock = lock
        self._kept = {update: each for update, each in self._kept.items() if each.path.is_dir()}

    def _mark(self, update: int, mark: bytes, ranks: int) -> list[str]:
        if update not in self._kept:
            return []
        self._kept[update] = kept = replace(self._kept[update], ranks=ranks)
        path = kept.path / VERIFIED
        try:
            if os.path.lexists(path):
                self._disk.remove_file(path)
            write_file(self._disk, path, [mark])
            self._disk.sync_folder(kept.path)
        except OSError as error:
            return [f"That ranks agree on {kept.path} could not be recorded: {error}."]
        return []

    def _set_aside(self, since: int) -> list[Path]:
        since = max([since, *(update for update, each in self._kept.items() if each.ranks)])
        doubtful = [self._kept.pop(update).path for update in sorted(self._kept) if update > since]
        return set_aside(self._disk, filter(kind_of, doubtful), UNVERIFIED)

    def _survey(self, out: Path) -> dict[int, Kept]:
        """Remove what an interrupted process has left, and return the snapshots of this run by their updates."""
        for path in self._folder.iterdir():
            if path.name.startswith(TEMPORARY):
                try:
                    remove(self._disk, path)
                except (OSError, SnapshotError) as error:
                    message = f"Unfinished snapshots could not be removed: {error}"
                    warn(message, SnapshotWarning)
        found = [(each, each.manifest) for each in list_snapshots(out) if each.manifest is not None]
        own = [(each, manifest) for each, manifest in found if manifest.run_id == self._run_id]
        return {each.update: Kept(each.path, each.update, manifest.metrics, each.ranks) for each, manifest in own}


def write_beside(
    out: str | Path,
    content: Content,
    *,
    reasons: Iterable[str],
    about: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write one snapshot without the lock of the folder, and return when it is durable.

    The ranks that survive the loss of another one call this at the same time, and rank 0 may be writing as well. That
    is safe because each of them writes a temporary folder, and the first to rename it wins; the bits of an update are
    equal. No older snapshot is removed: the run that resumes does that.

    Args:
        out: The folder of the run.
        content: The content.
        reasons: Why the snapshot is written.
        about: JSON values about the machine and the program, which are in no digest.
        disk: The calls of the operating system.

    Returns:
        The folder of the snapshot, which may be that of another rank.

    Raises:
        OSError: If a call of the operating system fails.
        SnapshotError: If there is a snapshot of this update with other bits or of another run.
        TypeError: If the content holds something that a snapshot cannot hold.
    """
    path = (snapshots_in(Path(out)) or Path(out) / FOLDER) / folder_name(content.progress["update"])
    write_now(disk or Disk(), path, content, reasons, about or {})
    return path


def _free_bytes(folder: Path) -> int | str:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        # The folder is gone, or its disk: then writing has failed for that reason, which the message has.
        return "an unknown number"


def _lower_priority() -> None:
    """Lower the priority of the calling thread below that of training, on Linux, where each thread has its own.

    Hashing takes a core for about a millisecond per megabyte. A thread of training that waits for the interpreter's
    lock while this one holds it leaves its core to this one. Only other programs that keep all cores busy may delay
    both.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
