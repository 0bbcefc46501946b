"""Nothing outside of the folder of a run is written or deleted: links, pipes and devices in it are refused by name."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.cli import main
from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.snapshots import SnapshotWriter, list as list_snapshots, load, newest_whole, write_beside
from tests.support.snapshots import RUN, assert_holds, small_content, write


def link(path: Path) -> None:
    path.symlink_to(path.parents[1])


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("a device needs the right to create one")


def bound(path: Path) -> None:
    # By a short relative name, which a socket needs.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


KINDS: dict[str, Callable[[Path], object]] = {
    "a link": link,
    "a FIFO": os.mkfifo,
    "a device": device,
    "a socket": bound,
    "a file": Path.touch,
}


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_archived_snapshot_that_was_linked_back_is_kept(tmp_path: Path) -> None:
    first, _ = write(tmp_path / "run", small_content(1), small_content(2))
    archived = tmp_path / "archive"
    shutil.move(first, archived)
    first.symlink_to(archived)
    before = content_of(archived)
    write(tmp_path / "run", small_content(3), small_content(4), keep=1)
    assert content_of(archived) == before
    assert first.is_symlink()
    [found, *_] = list_snapshots(tmp_path / "run")
    assert "00000001 cannot be read" in str(found.error)
    assert "must be the folder of a snapshot, got a link" in str(found.error)


def test_one_that_is_linked_during_the_run_is_kept(tmp_path: Path) -> None:
    archived = tmp_path / "archive"
    with SnapshotWriter(tmp_path / "run", run_id=RUN, keep=1) as writer:
        writer.save(small_content(1))
        writer.wait()
        assert writer.newest is not None
        shutil.move(writer.newest, archived)
        (tmp_path / "run/snapshots/00000001").symlink_to(archived)
        before = content_of(archived)
        writer.save(small_content(2))
        with pytest.warns(SnapshotWarning, match=r"00000001 must be a folder, got a link. It is left as it is"):
            writer.wait()
        writer.save(small_content(3))
        writer.wait()  # told once
    assert content_of(archived) == before
    assert [each.update for each in list_snapshots(tmp_path / "run") if each.manifest] == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_like_an_unfinished_snapshot_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "run"
    write(out, small_content(1))
    kept = tmp_path / "kept"
    kept.write_text("mine")
    odd = out / "snapshots" / ".tmp-x"
    KINDS[kind](odd)
    with pytest.warns(SnapshotWarning, match=rf"\.tmp-x must be a folder, got {kind}\. It is left as it is"):
        SnapshotWriter(out, run_id=RUN).close()
    assert os.path.lexists(odd)
    assert kept.read_text() == "mine"


def test_a_link_within_an_unfinished_snapshot_is_removed_without_its_target(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine").touch()
    unfinished = tmp_path / "run/snapshots/.tmp-x"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").symlink_to(kept / "mine")
    (unfinished / "snapshot.json").symlink_to(kept)
    os.mkfifo(unfinished / "state.safetensors")
    SnapshotWriter(tmp_path / "run", run_id=RUN).close()
    assert not unfinished.exists()
    assert (kept / "mine").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_of_snapshots_must_be_one(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    KINDS[kind](out / "snapshots")
    before = sorted(tmp_path.rglob("*"))
    message = f"snapshots must be a folder, got {kind}"
    calls: list[Callable[[], object]] = [
        lambda: SnapshotWriter(out, run_id=RUN),
        lambda: write_beside(out, small_content(1), reasons=["test"]),
        lambda: list_snapshots(out),
        lambda: newest_whole(out),
        lambda: ls.snapshots.compare_runs(out, out),
        lambda: ls.snapshots.export_hf(out, tmp_path / "hf"),
    ]
    for call in calls:
        with pytest.raises(SnapshotError, match=message):
            call()
    for command in ("snapshots", "report"):
        assert main([command, str(out)]) != 0
        assert message in capsys.readouterr().err
    assert main(["compare", str(out), str(out)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a file"])
def test_a_lock_must_be_a_file(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run/snapshots"
    folder.mkdir(parents=True)
    KINDS[kind](folder / ".lock")
    with pytest.raises(SnapshotError, match=rf"\.lock must be a file with this name alone, got {kind}"):
        SnapshotWriter(tmp_path / "run", run_id=RUN)


def test_a_lock_that_is_another_file_too_is_not_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "run/snapshots"
    folder.mkdir(parents=True)
    os.link(mine, folder / ".lock")
    with pytest.raises(SnapshotError, match="with this name alone"):
        SnapshotWriter(tmp_path / "run", run_id=RUN)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_the_name_of_a_snapshot_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    [whole] = write(tmp_path, small_content(1))
    odd = whole.with_name("00000002")
    KINDS[kind](odd)
    with pytest.raises(SnapshotError, match=f"must be the folder of a snapshot, got {kind}"):
        load(odd)
    with pytest.warns(SnapshotWarning, match=f"00000002 is damaged and is now named damaged-00000002.*got {kind}"):
        snapshot = newest_whole(tmp_path)
    assert snapshot is not None
    assert snapshot.path == whole
    KINDS[kind](odd)
    # A new snapshot of this update takes its place.
    write(tmp_path, small_content(2))
    assert_holds(load(odd), small_content(2))
    assert len(list(whole.parent.glob("damaged-00000002-*"))) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["snapshot.json", "state.safetensors", "verified.json"])
def test_what_has_the_name_of_a_file_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    [folder] = write(tmp_path, small_content(1))
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    if name == "verified.json":
        assert list_snapshots(tmp_path)[0].ranks == 0
        with SnapshotWriter(tmp_path, run_id=RUN) as writer:
            writer.mark_verified(1, load(folder).digest, 2)
        assert list_snapshots(tmp_path)[0].ranks == 2
        return
    with pytest.raises(SnapshotError) as raised:
        load(folder)
    if kind != "a file":
        assert raised.value.file == name
        assert f"must be a regular file, got {kind}" in str(raised.value)
