"""A disk that is full or fails costs a snapshot, and nothing else."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.snapshots import Disk, SnapshotWriter, newest_whole, verify
from tests.support.snapshots import RUN, assert_holds, small_content, write

KINDS = (
    "create_folder",
    "create_file",
    "write",
    "sync",
    "close",
    "sync_folder",
    "rename",
    "remove_file",
    "remove_folder",
)
CONTENT = {update: small_content(update) for update in range(1, 8)}


class FailingDisk(Disk):
    """A disk of which the calls of one kind fail from some call on, for a number of calls."""

    def __init__(self, kind: str, first: int, error: int, times: int = 1) -> None:
        self.failed = 0
        self._kind, self._first, self._error, self._times = kind, first, error, times
        self._count = 0
        for each in KINDS:
            setattr(self, each, self._failing(each, getattr(self, each)))

    def _failing(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if kind != self._kind:
                return call(*args)
            self._count += 1
            if not self._first <= self._count < self._first + self._times:
                return call(*args)
            self.failed += 1
            if kind == "close":
                call(*args)
            if kind == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            raise OSError(self._error, os.strerror(self._error))

        return called


def failures(out: Path, kind: str, error: int) -> int:
    """Let every call of a kind fail in turn while the second snapshot is written. Return how many could."""
    for first in range(1, 100):
        shutil.rmtree(out, ignore_errors=True)
        [old] = write(out, CONTENT[1], keep=1)
        disk = FailingDisk(kind, first, error)
        with (
            warnings.catch_warnings(record=True) as caught,
            SnapshotWriter(out, run_id=RUN, keep=1, disk=disk) as writer,
        ):
            warnings.simplefilter("always")
            writer.save(CONTENT[2])
            writer.wait()
            newest = newest_whole(out)
            assert newest is not None
            assert_holds(newest, CONTENT[newest.update])
            if not disk.failed:
                assert not caught
                return first - 1
            assert issubclass(caught[0].category, SnapshotWarning)
            if writer.newest is None:
                assert f"{os.strerror(error)}" in str(caught[0].message)
                assert re.search(r"needs about \d+ bytes, and \d+ are free", str(caught[0].message))
                verify(old)
            writer.save(CONTENT[3])
            writer.wait()
        newest = newest_whole(out)
        assert newest is not None
        assert_holds(newest, CONTENT[3])
        assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(out) in os.path.realpath(fd)]
    raise AssertionError


EXPECTED = {
    "create_folder": 1,
    "create_file": 4,
    "write": 4,
    "sync": 4,
    "close": 4,
    "sync_folder": 3,
    "rename": 2,
    "remove_file": 4,
    "remove_folder": 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_may_fail(memory_path: Path, kind: str) -> None:
    assert failures(memory_path / "out", kind, errno.ENOSPC) == EXPECTED[kind]


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_may_fail_with_other_errors(memory_path: Path, kind: str, error: int) -> None:
    assert failures(memory_path / "out", kind, error) == EXPECTED[kind]


def test_three_failures_in_a_row_raise_if_snapshots_are_required(tmp_path: Path) -> None:
    disk = FailingDisk("sync", 1, errno.EIO, times=10**6)
    writer = SnapshotWriter(tmp_path, run_id=RUN, required=True, disk=disk)
    for update in (1, 2):
        writer.save(CONTENT[update])
        with pytest.warns(SnapshotWarning, match=r"update \d could not be written.*Input/output error.*bytes"):
            writer.wait()
    writer.save(CONTENT[3])
    with pytest.warns(SnapshotWarning), pytest.raises(SnapshotError, match="The last 3 attempts"):
        writer.wait()
    with pytest.raises(SnapshotError, match="The last 3 attempts"):
        writer.save(CONTENT[4])
    with pytest.raises(SnapshotError):
        writer.close()
    writer.close()


def test_a_folder_that_cannot_come_back_only_warns(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / "out", run_id=RUN) as writer:
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").write_text("a file in its place")
        writer.save(CONTENT[1])
        with pytest.warns(SnapshotWarning, match="File exists.*an unknown number are free"):
            writer.wait()


def test_a_durable_snapshot_is_recorded_although_older_ones_cannot_be_removed(tmp_path: Path) -> None:
    disk = FailingDisk("remove_file", 1, errno.EIO, times=10**6)
    with SnapshotWriter(out=tmp_path, run_id=RUN, keep=1, disk=disk) as writer:
        for update in (1, 2):
            writer.save(CONTENT[update], must=True)
        with pytest.warns(SnapshotWarning, match="Old snapshots in .* could not be removed"):
            writer.wait()
        assert [each.update for each in writer.take_records()] == [1, 2]


def test_failures_that_are_not_in_a_row_only_warn(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, run_id=RUN, required=True, disk=FailingDisk("sync", 1, errno.EIO, times=2)) as writer:
        for update in (1, 2):
            writer.save(CONTENT[update])
            with pytest.warns(SnapshotWarning):
                writer.wait()
        writer.save(CONTENT[3])
    assert verify(tmp_path / "snapshots" / "00000003").update == 3


def test_a_required_last_snapshot_that_fails_raises_at_the_end(tmp_path: Path) -> None:
    disk = FailingDisk("sync", 1, errno.EIO)
    writer = SnapshotWriter(tmp_path, run_id=RUN, required=True, disk=disk)
    writer.save(CONTENT[1])
    with pytest.warns(SnapshotWarning), pytest.raises(SnapshotError, match="The last 1 attempts"):
        writer.close()


TOO_SMALL = """
import subprocess, sys, warnings
from pathlib import Path
from lockstep.snapshots import newest_whole, SnapshotWriter
from tests.support.snapshots import RUN, assert_holds, small_content
warnings.simplefilter("ignore")
for size in sys.argv[2:]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", sys.argv[1]], check=True)
    out = Path(sys.argv[1]) / "out"
    with SnapshotWriter(out, run_id=RUN, keep=1) as writer:
        for update in (1, 2, 3):
            writer.save(small_content(update, rows=2000))
            writer.wait()
    snapshot = newest_whole(out)
    if snapshot is not None:
        assert_holds(snapshot, small_content(snapshot.update, rows=2000))
    print(0 if snapshot is None else snapshot.update)
    subprocess.run(["umount", sys.argv[1]], check=True)
"""


def newest_on_disks(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Save three snapshots of some 145 KB on disks of some sizes in KB, and return the newest whole ones."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a disk of limited size needs the right to mount one")
    command = ["unshare", "-m", sys.executable, "-c", TOO_SMALL, str(folder), *map(str, sizes)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"a disk of limited size cannot be mounted here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_disks_that_are_too_small(tmp_path: Path) -> None:
    assert newest_on_disks(tmp_path, [4, 100, 200, 400]) == ["0", "0", "1", "3"]


@pytest.mark.slow
def test_disks_of_64_sizes(tmp_path: Path) -> None:
    found = newest_on_disks(tmp_path, [4 + 6 * number for number in range(64)])
    print(found)  # noqa: T201 - for the table
    assert len(found) == 64
    assert found == sorted(found)
    assert set(found) == {"0", "1", "3"}
