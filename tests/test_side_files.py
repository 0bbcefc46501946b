"""Side files: whole lines whatever happens to the disk, and nothing outside of the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.errors import SideFileError, SideFileWarning
from lockstep.side_files import SideFile
from tests.support.side_files import KINDS, full_disk, plant


@pytest.fixture
def file(tmp_path: Path) -> SideFile:
    return SideFile(tmp_path / "run", "log.jsonl")


def test_what_is_added_is_written_with_the_next_write(file: SideFile) -> None:
    assert file.read() is None
    file.begin(b"1\n")
    file.add(b"2\n")
    assert file.read() is None
    file.append(b"3\n")
    assert file.read() == file.content == b"1\n2\n3\n"
    file.begin()
    file.close()
    assert file.read() == b"1\n2\n3\n"


def test_a_short_write_is_undone_and_made_up_for(file: SideFile) -> None:
    file.append(b"first\n")
    for number in range(20):
        line = b"%d" % number * 40 + b"\n"
        before = file.read()
        with full_disk(len(file.content) + 7), pytest.warns(SideFileWarning, match=r"log\.jsonl could not be written"):
            file.append(line)
        assert file.read() == before
        if number % 3 == 0:
            file.append(b"between\n")
            assert file.read() == file.content
    file.close()
    assert file.read() == file.content
    assert len(file.content.splitlines()) == 1 + 20 + 7


def test_a_file_that_is_replaced_stays_whole_if_the_new_one_does_not_fit(file: SideFile) -> None:
    file.replace(b"old\n")
    with full_disk(7), pytest.warns(SideFileWarning):
        file.replace(b"new\n" * 20)
    assert file.read() == b"old\n"
    assert list(file.path.parent.iterdir()) == [file.path]
    file.close()
    assert file.read() == b"new\n" * 20


@pytest.mark.parametrize("nested", ["log.jsonl", "a/b/log.jsonl"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_gone_comes_back(tmp_path: Path, nested: str, moved: bool) -> None:
    file = SideFile(tmp_path / "run", nested)
    file.append(b"1\n")
    (tmp_path / "run").rename(tmp_path / "moved") if moved else shutil.rmtree(tmp_path / "run")
    file.append(b"2\n")
    assert file.read() == b"1\n2\n"
    assert not moved or (tmp_path / "moved" / nested).read_bytes() == b"1\n"


@pytest.mark.parametrize("change", [b"", b"1\n", b"1\n2\n3"])
def test_a_file_that_something_else_changed_is_replaced(file: SideFile, change: bytes) -> None:
    file.append(b"1\n2\n")
    file.path.unlink()
    file.path.write_bytes(change)
    file.append(b"3\n")
    assert file.read() == b"1\n2\n3\n"


def test_a_required_file_raises_and_forgets_the_line(tmp_path: Path) -> None:
    file = SideFile(tmp_path, "log.jsonl", required=True)
    file.append(b"1\n")
    with full_disk(3), pytest.raises(SideFileError, match=r"log\.jsonl could not be written.*required=True"):
        file.append(b"2\n")
    file.append(b"2\n")
    assert file.read() == b"1\n2\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.new"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, file: SideFile, name: str, kind: str) -> None:
    target = tmp_path / "outside"
    target.write_text("precious")
    file.path.parent.mkdir()
    plant(file.path.with_name(name), kind, target)
    for call in (file.check, file.read, lambda: file.read_lines(print), file.read_json):
        with pytest.raises(SideFileError, match=f"{name} must be a regular file, got {kind}"):
            call()
    for call in (lambda: file.append(b"1\n"), lambda: file.replace(b"1\n"), lambda: file.write(durable=True)):
        with pytest.warns(SideFileWarning, match=f"{name} must be a regular file, got {kind}"):
            call()
    assert target.read_text() == "precious"


def test_a_link_to_a_device_is_not_read(file: SideFile) -> None:
    file.path.parent.mkdir()
    file.path.symlink_to("/dev/zero")
    with pytest.raises(SideFileError, match="got a link"):
        file.read()


def test_a_file_that_becomes_a_link_during_the_run_is_not_followed(tmp_path: Path, file: SideFile) -> None:
    target = tmp_path / "outside"
    file.append(b"1\n")
    file.path.rename(target)
    file.path.symlink_to(target)
    with pytest.warns(SideFileWarning, match="got a link"):
        file.append(b"2\n")
    assert target.read_bytes() == b"1\n"
    file.path.unlink()
    file.append(b"3\n")
    assert file.read() == b"1\n2\n3\n"


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").symlink_to(tmp_path / "outside")
    file = SideFile(tmp_path / "run", "logs/log.jsonl")
    with pytest.raises(SideFileError, match=r"logs must be a folder, got a link"):
        file.check()
    with pytest.warns(SideFileWarning):
        file.append(b"1\n")
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("name", ["/tmp/log", "../log", "a/../../log", "", "."])  # noqa: S108 - is not written
def test_a_name_must_stay_below_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="`filename` must be a path below the folder of the run, got"):
        SideFile(tmp_path, name)


@pytest.mark.parametrize("line", [b"1e999x", b"[" * 100_000, b"\xff", b"", b"{", b"1" * 5000])
def test_a_damaged_line_is_named(file: SideFile, line: bytes) -> None:
    file.replace(b"1\n" + line + b"\n2\n")
    with pytest.raises(SideFileError, match=r"log\.jsonl must .*but line 2 .* is damaged: .*Restore it from a copy"):
        file.read_lines(int)
    found: list[int] = []
    assert file.read_lines(found.append, strict=False) == 1
    assert found == [1, 2]
    with pytest.raises(SideFileError, match=r"but the file is damaged"):
        file.read_json()


def test_a_line_that_was_cut_is_left_out(file: SideFile) -> None:
    file.replace(b"1\n2")
    found: list[int] = []
    assert file.read_lines(found.append) == 0
    assert found == [1]
