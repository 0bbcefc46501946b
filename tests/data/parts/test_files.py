"""Files as parts of a dataset: what they hold, how they are found again, and what is read of them."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.data import Part, Parts, TextLines
from tests.support.counted_files import num_bytes_read, open_counted


def everything(part: Part) -> list[Any]:
    return [sample for block in range(len(part.lengths)) for sample in part.read(block)]


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb", "a\r\nb\r\n\n", "é\n" * 7, "\n\n\n", "a\n\n"])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_lines_are_those_of_the_file(tmp_path: Path, text: str, block: int) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    part = TextLines(tmp_path / "a.txt", block=block)
    lines = [line.rstrip("\r\n") for line in text.splitlines(keepends=True)]
    assert everything(part) == lines
    assert sum(part.lengths) == len(lines)
    assert part.name == str(tmp_path / "a.txt")


def test_an_index_replaces_the_first_pass(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    log = tmp_path / "log"
    log.mkdir()
    options: dict[str, Any] = {
        "block": 10,
        "index": tmp_path / "index" / "a.json",
        "open_file": partial(open_counted, log),
    }
    size = (tmp_path / "a.txt").stat().st_size
    first = TextLines(tmp_path / "a.txt", **options)
    assert sum(first.lengths) == 1000
    assert num_bytes_read(log) == size
    second = TextLines(tmp_path / "a.txt", **options)
    assert second.lengths == first.lengths
    assert num_bytes_read(log) == size
    assert second.read(99)[9] == "line 999"
    assert num_bytes_read(log) == size + 90
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["a.json"]


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    path, index = tmp_path / "a.txt", tmp_path / "index.json"
    path.write_text("a\nb\n")
    assert TextLines(path, index=index).lengths == [2]
    path.write_text("a\nb\nc\n")
    with pytest.raises(ls.StateError, match=r"`index` must be the index of .*'bytes': 6.* got .*index.json, the index"):
        TextLines(path, index=index).lengths  # noqa: B018 - what raises
    with pytest.raises(ls.StateError, match=r"'block': 5"):
        TextLines(path, index=index, block=5).lengths  # noqa: B018
    index.write_text(json.dumps([1]))
    with pytest.raises(ls.StateError, match="which holds something else"):
        TextLines(path, index=index).lengths  # noqa: B018


def test_a_line_that_cannot_be_decoded_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n\xff\nc\n")
    parts = Parts([TextLines(tmp_path / "a.txt")], on_bad_record="skip", num_sections=1)
    batches = ls.BatchIterator(parts, 3)
    assert list(batches.peek()) == ["a", "c", "c"]
    assert parts.num_skipped == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst"])
def test_compressed_files_are_refused_and_read_by_a_function(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"`path` must be that of a file that is not compressed, got .*{name}"):
        TextLines(tmp_path / name)
    (tmp_path / name).write_bytes(gzip.compress(b"a\nb\nc\n"))
    part = TextLines(tmp_path / name, block=2, open_file=gzip.open)  # type: ignore[arg-type]
    assert everything(part) == ["a", "b", "c"]


def test_encodings_whose_line_ends_are_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`encoding` must write the end of a line as one byte, .* got 'utf-16'"):
        TextLines(tmp_path / "a.txt", encoding="utf-16")
    (tmp_path / "a.txt").write_bytes("\ufeffé\r\nb".encode())
    assert everything(TextLines(tmp_path / "a.txt", encoding="utf-8-sig")) == ["é", "b"]
