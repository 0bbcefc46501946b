"""Archives in the format of webdataset, made by Python's tarfile; `test_libraries` has those of webdataset itself."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path

import pytest

from lockstep.data import Parts, TarSamples
from tests.data.parts.test_files import everything
from tests.support.counted_files import num_bytes_read, open_counted


def archive(path: Path, num_samples: int = 11, format: int = tarfile.PAX_FORMAT) -> None:  # noqa: A002 - tarfile's word
    with tarfile.open(path, "w", format=format) as made:
        folder = tarfile.TarInfo("train")
        folder.type = tarfile.DIRTYPE
        made.addfile(folder)
        for number in range(num_samples):
            # Long names and those that are not ASCII take headers of their own.
            key = f"train/{number:03}" + ("é" * 150 if number % 3 == 1 else "")
            for entry, content in (("TXT", b"text %d" % number), ("seg.cls", b"%d" % (number % 4))):
                member = tarfile.TarInfo(f"{key}.{entry}")
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
        for name in ("train/README", "__meta__.json"):
            made.addfile(tarfile.TarInfo(name))


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_samples_are_neighbouring_files(tmp_path: Path, block: int, format: int) -> None:  # noqa: A002 - as above
    archive(tmp_path / "a.tar", format=format)
    part = TarSamples(tmp_path / "a.tar", block=block, index=tmp_path / "a.index")
    found = everything(part)
    assert [sample["txt"] for sample in found] == [b"text %d" % number for number in range(11)]
    assert [int(sample["seg.cls"]) for sample in found] == [number % 4 for number in range(11)]
    assert found[3] == {"__key__": "train/003", "txt": b"text 3", "seg.cls": b"3"}
    assert everything(TarSamples(tmp_path / "a.tar", block=block, index=tmp_path / "a.index")) == found


def test_a_block_is_all_that_is_read(tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", 300)
    (log := tmp_path / "log").mkdir()
    options = {"block": 10, "index": tmp_path / "a.index", "open_file": partial(open_counted, log)}
    assert sum(TarSamples(tmp_path / "a.tar", **options).lengths) == 300  # type: ignore[arg-type]
    before = num_bytes_read(log)
    TarSamples(tmp_path / "a.tar", **options).read(20)  # type: ignore[arg-type]
    assert num_bytes_read(log) - before <= (tmp_path / "a.tar").stat().st_size / 25


def test_an_archive_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    archive(path)
    parts = Parts([TarSamples(path, block=3)], num_sections=1)
    assert len(parts) == 11  # in four blocks, of which the last begins at 25,088 bytes
    path.write_bytes(path.read_bytes()[:25088])
    assert parts[0]["txt"] == b"text 0"
    with pytest.raises(match=r"Cannot read block 3 of .*a.tar: EOFError: The file ends at 25088 instead of"):
        parts[10]
