"""The log of digests: what it keeps over restarts, and what it detects."""

from __future__ import annotations

from pathlib import Path

from lockstep.snapshots import DigestLog, Record, read_digest_log


def record(update: int, **tensors: str) -> Record:
    return Record(update, f"digest of {update} {tensors}", {name: digits * 8 for name, digits in tensors.items()})


def opened(out: Path, conditions: str = "c", *, resumed_at: int | None = None) -> DigestLog:
    return DigestLog(out, conditions=conditions, resumed_at=resumed_at)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = opened(tmp_path)
    records = [record(1, a="1", b="2"), record(2, a="3", b="4"), record(3, a="5", b="6", c="7")]
    assert [log.record(each) for each in records] == [None] * 3
    assert list(read_digest_log(tmp_path).values()) == records
    assert len((tmp_path / "digests.jsonl").read_text().splitlines()) == 5  # two headers


def test_repeated_updates_are_compared_and_not_written_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for update in (1, 2, 3):
        first.record(record(update, a="1", b=str(update)))
    again = opened(tmp_path, resumed_at=1)
    before = (tmp_path / "digests.jsonl").read_bytes()
    assert again.record(record(2, a="1", b="2")) is None
    assert (tmp_path / "digests.jsonl").read_bytes() == before
    found = again.record(record(3, a="1", b="9"))
    assert found is not None
    assert "Update 3 was repeated" in str(found)
    assert "the tensor 'b' differs (SHA-256 33333333..., now 99999999...)" in str(found)
    assert read_digest_log(tmp_path)[3] == record(3, a="1", b="9")


def test_counters_alone_may_differ(tmp_path: Path) -> None:
    opened(tmp_path).record(record(2, a="1"))
    found = opened(tmp_path, resumed_at=0).record(Record(2, "another", {"a": "1" * 8}))
    assert "every tensor is equal, but counters or options differ" in str(found)


def test_a_new_run_begins_a_new_log(tmp_path: Path) -> None:
    opened(tmp_path).record(record(1, a="1"))
    assert opened(tmp_path).record(record(1, a="2")) is None
    assert read_digest_log(tmp_path) == {1: record(1, a="2")}


def test_under_other_conditions_later_updates_do_not_count(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for update in (1, 2):
        first.record(record(update, a="1"))
    other = opened(tmp_path, "d", resumed_at=1)
    assert other.record(record(2, a="2")) is None
    assert read_digest_log(tmp_path) == {1: record(1, a="1"), 2: record(2, a="2")}


def test_a_line_that_was_cut_ends_the_log(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for update in (1, 2):
        first.record(record(update, a="1"))
    path = tmp_path / "digests.jsonl"
    for size in range(1, len(path.read_bytes().splitlines(keepends=True)[-1])):
        cut = tmp_path / str(size)
        cut.mkdir()
        (cut / "digests.jsonl").write_bytes(path.read_bytes()[:-size])
        again = opened(cut, resumed_at=2)
        assert set(read_digest_log(cut)) == {1}
        again.record(record(3, a="3"))
        assert set(read_digest_log(cut)) == {1, 3}
