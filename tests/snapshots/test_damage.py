"""A snapshot of which any bit has changed, or any end is missing, is refused, and the one before it is used."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.snapshots import list as list_snapshots, load, newest_whole, verify
from tests.support.snapshots import assert_holds, of_a_newer_format, small_content, write

VERIFIED = ("model.safetensors", "state.safetensors", "snapshot.json")
ROWS = 230
"""Some 18 KB in all."""


def accepted_flips(folder: Path, bits: range) -> list[tuple[str, int]]:
    """Flip bits one after the other, counted over all files, and return those that went unnoticed."""
    accepted, first = [], 0
    for name in VERIFIED:
        path = folder / name
        data = bytearray(path.read_bytes())
        for bit in bits:
            if first <= bit < first + 8 * len(data):
                place, mask = (bit - first) // 8, 1 << (bit - first) % 8
                data[place] ^= mask
                path.write_bytes(data)
                with suppress(SnapshotError):
                    load(folder)
                    accepted.append((name, bit - first))
                data[place] ^= mask
        path.write_bytes(data)
        first += 8 * len(data)
    assert load(folder).update == 1
    return accepted


def bits_of(folder: Path) -> int:
    return 8 * sum((folder / name).stat().st_size for name in VERIFIED)


def test_some_flipped_bits_are_refused(memory_path: Path) -> None:
    [folder] = write(memory_path, small_content(rows=ROWS))
    assert accepted_flips(folder, range(0, bits_of(folder), 997)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_flipped_bit_is_refused(memory_path: Path, part: int) -> None:
    [folder] = write(memory_path, small_content(rows=ROWS))
    bits = range(part, bits_of(folder), 8)
    print(f"{len(bits)} bits of {bits_of(folder) // 8} bytes")  # noqa: T201 - for the table
    assert accepted_flips(folder, bits) == []


def accepted_cuts(folder: Path, step: int) -> list[tuple[str, int]]:
    """Cut files to every size, and return those sizes that went unnoticed."""
    accepted = []
    for name in VERIFIED:
        path = folder / name
        data = path.read_bytes()
        for size in range(0, len(data), step):
            path.write_bytes(data[:size])
            with suppress(SnapshotError):
                load(folder)
                accepted.append((name, size))
        path.write_bytes(data)
    return accepted


def test_some_cuts_are_refused(memory_path: Path) -> None:
    [folder] = write(memory_path, small_content(rows=ROWS))
    assert accepted_cuts(folder, 101) == []


@pytest.mark.slow
def test_every_cut_is_refused(memory_path: Path) -> None:
    [folder] = write(memory_path, small_content(rows=ROWS))
    assert accepted_cuts(folder, 1) == []


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_flipped_bits_of_a_large_snapshot_are_refused(memory_path: Path, count: int) -> None:
    [folder] = write(memory_path, small_content(rows=30_000))
    draw = random.Random(0)  # noqa: S311
    bits = sorted(draw.randrange(bits_of(folder)) for _ in range(count))
    for bit in bits:
        assert accepted_flips(folder, range(bit, bit + 1)) == []


def test_the_one_before_a_damaged_one_is_used_and_the_warning_names_both_digests(tmp_path: Path) -> None:
    first, second = small_content(1), small_content(2)
    whole, damaged = write(tmp_path, first, second)
    path = damaged / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="state/half") as caught:
        verify(damaged)
    error = caught.value
    assert (error.file, error.tensor, error.damaged) == ("state.safetensors", "state/half", True)
    assert error.expected is not None
    assert error.found is not None
    with pytest.warns(SnapshotWarning, match=f"(?s)00000002.*damaged-.*{error.expected}.*{error.found}"):
        snapshot = newest_whole(tmp_path)
    assert snapshot is not None
    assert snapshot.path == whole
    assert_holds(snapshot, first)
    names = sorted(path.name.rpartition("-")[0] for path in whole.parent.iterdir())
    assert names == ["", "", "damaged-00000002"]
    # The renamed one is neither seen again nor in the way of a new one.
    assert [found.update for found in list_snapshots(tmp_path)] == [1]
    write(tmp_path, second)
    assert [found.update for found in list_snapshots(tmp_path)] == [1, 2]


def test_no_whole_one_is_an_error_and_none_at_all_is_none(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None
    [folder] = write(tmp_path, small_content())
    (folder / "snapshot.json").unlink()
    with pytest.warns(SnapshotWarning, match="cannot be read"), pytest.raises(SnapshotError, match="No snapshot in"):
        newest_whole(tmp_path)


def test_a_link_that_leads_nowhere_is_damaged(tmp_path: Path) -> None:
    [whole] = write(tmp_path, small_content(1))
    whole.with_name("00000002").symlink_to(tmp_path / "gone")
    with pytest.warns(SnapshotWarning, match="00000002 is damaged and is now named damaged-00000002"):
        snapshot = newest_whole(tmp_path)
    assert snapshot is not None
    assert snapshot.path == whole


def test_damaged_ones_are_listed_with_the_reason(tmp_path: Path) -> None:
    first, second = write(tmp_path, small_content(1), small_content(2))
    (first / "snapshot.json").write_bytes(b"{}")
    found = list_snapshots(tmp_path)
    assert [each.update for each in found] == [1, 2]
    assert isinstance(found[0].error, SnapshotError)
    assert found[1].manifest == verify(second)


def test_a_folder_with_another_number_is_damaged(tmp_path: Path) -> None:
    first, second = write(tmp_path, small_content(1), small_content(2))
    shutil.rmtree(second)
    first.rename(second)
    with pytest.warns(SnapshotWarning, match="update 2 holds the snapshot of update 1"), pytest.raises(SnapshotError):
        newest_whole(tmp_path)


def test_what_cannot_be_judged_is_neither_renamed_nor_passed_over(tmp_path: Path) -> None:
    _, newest = write(tmp_path, small_content(1), small_content(2))
    manifest = newest / "snapshot.json"
    manifest.write_bytes(of_a_newer_format(manifest.read_bytes()))
    with pytest.raises(SnapshotError, match=r"format 3, written by 'lockstep .*Use a newer version"):
        newest_whole(tmp_path)
    assert newest.is_dir()
