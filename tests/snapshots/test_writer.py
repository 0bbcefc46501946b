"""Snapshots are written while training goes on: whole, in order, and no more than are to be kept."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from lockstep.errors import OrderError, SnapshotError, SnapshotWarning
from lockstep.snapshots import Content, Disk, SnapshotWriter, list as list_snapshots, load, write_beside
from lockstep.snapshots.disk import FolderLock
from tests.support.snapshots import RUN, assert_holds, digest_of, filled, of_a_newer_format, small_content, write


class HeldDisk(Disk):
    """A disk whose folders are created only when they may be."""

    def __init__(self) -> None:
        self.may, self.waits = Event(), Event()

    def create_folder(self, path: Path) -> None:
        if path.name.startswith(".tmp-"):
            self.waits.set()
            self.may.wait()
        super().create_folder(path)


class SlowDisk(Disk):
    """A disk that takes its time for each write."""

    def write(self, descriptor: int, data: memoryview) -> None:
        time.sleep(0.001)
        super().write(descriptor, data)


def updates(out: Path) -> list[int]:
    return [found.update for found in list_snapshots(out)]


def torn_or_stale(out: Path, saves: int, *, sizes: Sequence[int] = (3, 1000, 5000)) -> list[int]:
    """Change every tensor as soon as each save returns, and list the snapshots that hold anything but their update."""
    tensors = [torch.empty(size) for size in sizes]
    wrong = []
    with SnapshotWriter(out, run_id=RUN, keep=1, disk=SlowDisk()) as writer:
        for update in range(1, saves + 1):
            for tensor in tensors:
                tensor.copy_(filled(tuple(tensor.shape), update))
            models = {"main": {"a": tensors[0], "b": tensors[1]}}
            content = Content(progress={"update": update}, run_id=RUN, models=models, state=[tensors[2]])
            expected = digest_of(content)
            writer.save(content, must=True)
            for tensor in tensors:
                tensor.fill_(float("nan"))
            if update % 2 == 0:
                writer.wait()
                assert writer.newest is not None
                snapshot = load(writer.newest)
                if (snapshot.update, snapshot.digest) != (update, expected):
                    wrong.append(update)
    return wrong


def test_no_snapshot_is_torn_or_stale(memory_path: Path) -> None:
    assert torn_or_stale(memory_path, 40) == []


LARGE = (2**20, 7, 5 * 2**20)
"""The numbers of elements of tensors of which the largest has two blocks."""


def test_no_large_snapshot_is_torn_or_stale(memory_path: Path) -> None:
    assert torn_or_stale(memory_path, 6, sizes=LARGE) == []


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "sizes"), [(2000, (3, 1000, 5000)), (400, LARGE)])
def test_none_of_many_snapshots_is_torn_or_stale(memory_path: Path, saves: int, sizes: Sequence[int]) -> None:
    assert torn_or_stale(memory_path, saves, sizes=sizes) == []  # every other one is read


def test_a_newer_one_replaces_the_one_that_waits(tmp_path: Path) -> None:
    disk = HeldDisk()
    with SnapshotWriter(tmp_path, run_id=RUN, keep=9, disk=disk) as writer:
        writer.save(small_content(1))
        disk.waits.wait()
        for update in (2, 3, 4):
            writer.save(small_content(update))
        assert writer.replaced == 2
        disk.may.set()
    assert updates(tmp_path) == [1, 4]
    assert_holds(load(tmp_path / "snapshots" / "00000004"), small_content(4))


def test_one_that_must_be_written_is_not_replaced(tmp_path: Path) -> None:
    disk = HeldDisk()
    with SnapshotWriter(tmp_path, run_id=RUN, keep=9, disk=disk) as writer:
        writer.save(small_content(1))
        disk.waits.wait()
        writer.save(small_content(2))
        writer.save(small_content(3), must=True)
        writer.save(small_content(4))
        assert writer.replaced == 2
        disk.may.set()
        writer.save(small_content(5), must=True)
    assert updates(tmp_path) == [1, 3, 5]


def test_what_is_refused_replaces_nothing(tmp_path: Path) -> None:
    disk = HeldDisk()
    with SnapshotWriter(tmp_path, run_id=RUN, keep=9, disk=disk) as writer:
        writer.save(small_content(1))
        disk.waits.wait()
        writer.save(small_content(2))
        with pytest.raises(TypeError, match=r"got a value of type set at state\.a\.1"):
            writer.save(small_content(3, state={"a": [0, {1, 2}]}))
        disk.may.set()
    assert updates(tmp_path) == [1, 2]


def test_the_newest_and_the_best_are_kept_across_restarts(tmp_path: Path) -> None:
    values = [0.1, 0.9, 0.3, float("nan"), 0.9, 0.2]
    for update, value in enumerate(values, 1):
        write(tmp_path, small_content(update, metrics={"accuracy": value}), keep=2, best="accuracy")
    assert updates(tmp_path) == [2, 5, 6]
    write(tmp_path, small_content(7, metrics={"accuracy": 0.5}), keep=1, best="accuracy", mode="min")
    assert updates(tmp_path) == [6, 7]


def test_snapshots_of_other_runs_and_other_files_stay(tmp_path: Path) -> None:
    write(tmp_path, small_content(1))
    other = Content(progress={"update": 2}, run_id="other", models={"main": {"w": torch.ones(2)}})
    (tmp_path / "snapshots" / "notes.txt").write_text("mine")
    (tmp_path / "snapshots" / ".tmp-00000009-dead").mkdir()
    with SnapshotWriter(tmp_path, run_id="other", keep=1) as writer:
        writer.save(other)
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert names == [".lock", "00000001", "00000002", "notes.txt"]


def test_the_same_update_again_is_the_same_snapshot(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content(1))
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    write(tmp_path, small_content(1))
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    with SnapshotWriter(tmp_path, run_id=RUN) as writer:
        writer.save(small_content(1, state=[torch.zeros(3)]))
        with pytest.warns(SnapshotWarning, match="holds another snapshot of update 1"):
            writer.wait()
    assert_holds(load(folder), small_content(1))


def test_a_damaged_one_of_the_same_update_makes_room(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content(1))
    (folder / "snapshot.json").write_bytes(b"")
    write(tmp_path, small_content(1))
    assert_holds(load(folder), small_content(1))
    assert len(list(folder.parent.glob("damaged-00000001-*"))) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_gone_comes_back_locked(tmp_path: Path, moved: bool) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with SnapshotWriter(out, run_id=RUN, keep=2) as writer:
        for update in (1, 2):
            writer.save(small_content(update), must=True)
        writer.wait()
        out.rename(elsewhere) if moved else shutil.rmtree(out)
        writer.save(small_content(3), must=True)
        with pytest.warns(SnapshotWarning, match=r"run/snapshots was removed or moved\. A new one is there") as caught:
            writer.wait()
        assert len(caught) == 1
        with pytest.raises(SnapshotError, match="in use by process"):
            SnapshotWriter(out, run_id=RUN)
        for update in (4, 5):
            writer.save(small_content(update), must=True)
    assert updates(out) == [4, 5]
    assert updates(elsewhere) == ([1, 2] if moved else [])


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    message = rf"in use by process {os.getpid()} on .*choose another `out`"
    with SnapshotWriter(tmp_path, run_id=RUN), pytest.raises(SnapshotError, match=message):
        SnapshotWriter(tmp_path, run_id=RUN)
    SnapshotWriter(tmp_path, run_id=RUN).close()


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, ended = context.Event(), context.Event()

    def linger() -> None:
        started.set()
        ended.wait()

    lock = FolderLock(tmp_path)
    child = context.Process(target=linger)
    child.start()
    started.wait()
    os.close(lock._descriptor)  # as if this process had been killed
    lock._descriptor = -1
    FolderLock(tmp_path).close()
    ended.set()
    child.join()


def test_nothing_is_saved_after_the_end(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, run_id=RUN)
    writer.close()
    writer.close()
    with pytest.raises(OrderError, match="before `close`"):
        writer.save(small_content())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep": 0}, "`keep` must be at least 1, got 0"),
        ({"mode": "best"}, "`mode` must be 'max' or 'min', got 'best'"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SnapshotWriter(tmp_path, run_id=RUN, **options)  # type: ignore[arg-type]


def test_about_names_the_host_and_a_snapshot_is_whole_without_it(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content(), about={"placement": [["cpu"]]})
    assert '"placement": [["cpu"]]' in (folder / "about.json").read_text()
    (folder / "about.json").unlink()
    load(folder)


def test_survivors_may_write_the_same_update(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, run_id=RUN) as writer:
        first = write_beside(tmp_path, small_content(3), reasons=["emergency snapshot of rank 1"])
        before = first.stat().st_ino
        assert write_beside(tmp_path, small_content(3), reasons=["emergency snapshot of rank 2"]) == first
        # The rank with the lock writes it too.
        writer.save(small_content(3), reasons=["emergency snapshot of rank 0"], must=True)
    assert first.stat().st_ino == before
    assert load(first).manifest.reasons == ("emergency snapshot of rank 1",)


def test_a_survivor_does_not_take_a_damaged_snapshot_for_its_own(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content(3))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert write_beside(tmp_path, small_content(3), reasons=["emergency"]) == folder
    assert_holds(load(folder), small_content(3))
    assert load(folder).manifest.reasons == ("emergency",)
    assert len(list(folder.parent.glob("damaged-00000003-*"))) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (small_content(3, run_id="f" * 16), "of the run 'ffffffffffffffff'"),
        (small_content(3, rows=6), "holds another snapshot of update 3"),
    ],
)
def test_a_survivor_does_not_take_another_snapshot_for_its_own(tmp_path: Path, other: Content, message: str) -> None:
    folder = write_beside(tmp_path, other, reasons=["other"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SnapshotError, match=message):
        write_beside(tmp_path, small_content(3), reasons=["emergency"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(each.name for each in folder.parent.iterdir()) == ["00000003"]


def test_a_snapshot_that_cannot_be_judged_is_not_taken_for_damaged(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content(3))
    manifest = folder / "snapshot.json"
    manifest.write_bytes(of_a_newer_format(manifest.read_bytes()))
    with pytest.raises(SnapshotError, match="format 3"):
        write_beside(tmp_path, small_content(3), reasons=["emergency"])
    assert manifest.exists()


def test_of_two_that_write_at_once_the_first_wins(tmp_path: Path) -> None:
    class Racing(Disk):
        """A disk on which another rank is faster by one call."""

        def rename(self, path: Path, new: Path) -> None:
            if not new.exists():
                write_beside(tmp_path, small_content(3), reasons=["first"])
            super().rename(path, new)

    path = write_beside(tmp_path, small_content(3), reasons=["second"], disk=Racing())
    assert load(path).manifest.reasons == ("first",)
    assert updates(tmp_path) == [3]
    assert [each.name for each in (tmp_path / "snapshots").iterdir() if each.name.startswith(".tmp-")] == []


def test_a_value_that_is_observed_later_replaces_the_snapshot(tmp_path: Path) -> None:
    for metrics in ({}, {"accuracy": 0.9}, {}):
        write(tmp_path, small_content(3, metrics=metrics))
    found = list_snapshots(tmp_path)
    assert [(each.update, each.manifest and each.manifest.metrics) for each in found] == [(3, {"accuracy": 0.9})]
    assert load(found[0].path).manifest.metrics == {"accuracy": 0.9}
