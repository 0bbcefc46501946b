"""Parts under a `BatchIterator`: one order for any number of processes and workers, and each block read once."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.data import Part, Parts, StreamPart, TextLines
from lockstep.plan import cut


class Numbers(Part):
    """Numbers in memory, whose reads are counted."""

    def __init__(self, label: str, lengths: Sequence[int], *, in_order: bool = False) -> None:
        self.label, self._lengths, self.in_order = label, lengths, in_order
        self.reads: Counter[int] = Counter()

    @property
    def name(self) -> str:
        return self.label

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def read(self, block: int) -> Sequence[Any]:
        self.reads[block] += 1
        return [(self.label, block, offset) for offset in range(self._lengths[block])]


def some_parts(**options: Any) -> Parts:
    parts = [Numbers("a", [5, 9, 7, 8] * 5), Numbers("b", []), Numbers("c", [6] * 20, in_order=True)]
    return Parts(parts, **{"num_sections": 4, **options})


def drained(parts: Parts, epochs: int = 2, **options: Any) -> list[list[Any]]:
    batches = ls.BatchIterator(parts, 16, **{"shuffle": True, "seed": 1, **options})
    found = []
    while batches.epoch < epochs:
        found.append(list(next(batches)))
    batches.finalize()
    return found


def num_reads(parts: Parts) -> int:
    return sum(part.reads.total() for part in parts.parts if isinstance(part, Numbers))


@pytest.mark.parametrize("last_batch", ["short", "drop", "wrap"])
def test_an_epoch_holds_each_sample_once(last_batch: str) -> None:
    parts = some_parts()
    found = [sample for batch in drained(parts, 3, last_batch=last_batch) for sample in batch]
    size = len(parts)
    if last_batch == "drop":
        size -= size % 16
    for epoch in range(3):
        mine = found[epoch * size : (epoch + 1) * size]
        assert len(set(mine)) == size
        assert last_batch == "drop" or set(mine) == set(found[:size])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    assert drained(some_parts(), num_workers=workers) == drained(some_parts())


@pytest.mark.parametrize("last_batch", ["short", "wrap"])
def test_each_block_is_read_once_over_all_processes(last_batch: str) -> None:
    epochs, whole = 2, drained(some_parts(), last_batch=last_batch)
    num_blocks = sum(len(part.lengths) for part in some_parts().parts)
    for size in (1, 2, 4):
        reads, halves = 0, []
        for rank in range(size):
            parts = some_parts()
            batches = ls.BatchIterator(parts, 16, shuffle=True, seed=1, last_batch=last_batch)
            mine = []
            while batches.epoch < epochs:
                batch = next(batches)
                shards = cut(len(batch), min(4, len(batch)))
                mine.append(
                    [list(batch[shard.start : shard.stop]) for shard in shards[rank * 4 // size :][: 4 // size]]
                )
            reads += num_reads(parts)
            halves.append(mine)
        joined = [[each for mine in halves for shard in mine[at] for each in shard] for at in range(len(whole))]
        assert joined == whole
        # A block at the end of a section belongs to two sections. The samples of a short last batch are those of at
        # most three blocks, which each process may read.
        assert reads <= epochs * (num_blocks + 4 + 3 * size)


def test_the_bound_on_reads_is_not_empty() -> None:
    # A process that reads every second sample reads all blocks.
    parts = some_parts()
    batches = ls.BatchIterator(parts, 16, shuffle=True, seed=1)
    while batches.epoch < 1:
        batch = next(batches)
        for at in range(0, len(batch), 2):
            batch[at]
    assert num_reads(parts) >= 39  # of 40


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_at_any_batch_continues_and_reads_a_block_per_section_again(workers: int) -> None:
    whole = drained(some_parts())
    for at in range(0, len(whole), 7):
        first = ls.BatchIterator(some_parts(), 16, shuffle=True, seed=1)
        if at:
            first.advance(at)
        parts = some_parts()
        second = ls.BatchIterator(parts, 16, shuffle=True, num_workers=workers)
        second.load_state_dict(first.state_dict())
        assert list(second.peek()) == whole[at]
        assert num_reads(parts) <= 8  # in this process: two blocks for each section, of which one may end in the batch
        assert [list(next(second)) for _ in whole[at : at + 5]] == whole[at : at + 5]
        second.finalize()


def test_the_order_depends_on_batch_size_and_sections_which_stay_within_an_epoch() -> None:
    batches = ls.BatchIterator(some_parts(), 16, shuffle=True)
    state_at_start = batches.state_dict()
    batches.advance()
    state = batches.state_dict()
    ls.BatchIterator(some_parts(), 8, shuffle=True).load_state_dict(state_at_start)
    with pytest.raises(ls.StateError, match=r"`batch_size` must be 16, as when the state was saved"):
        ls.BatchIterator(some_parts(), 8, shuffle=True).load_state_dict(state)
    with pytest.raises(ls.StateError, match=r"`num_sections` must be 4"):
        ls.BatchIterator(some_parts(num_sections=2), 16, shuffle=True).load_state_dict(state)
    others = Parts([*some_parts().parts[:2], Numbers("c", [5, 7] * 10, in_order=True)], num_sections=4)
    ls.BatchIterator(others, 16, shuffle=True).load_state_dict(state_at_start)
    with pytest.raises(
        ls.StateError, match=r"`blocks` must be \w{16}, as when the state was saved, until the epoch ends"
    ):
        ls.BatchIterator(others, 16, shuffle=True).load_state_dict(state)


def test_a_batch_size_that_is_changed_later_is_not_that_of_the_order() -> None:
    batches = ls.BatchIterator(some_parts(), 16, shuffle=True)
    batches.advance()
    batches.batch_size = 8
    assert batches.state_dict()["batch_size"] == 16


def test_predictions_are_in_the_order_of_the_dataset() -> None:
    class Values(Numbers):
        def read(self, block: int) -> Sequence[Any]:
            return [torch.tensor([10.0 * block + offset]) for offset in range(self._lengths[block])]

    parts = Parts([Values("a", [7, 5, 9, 4])], num_sections=3)
    expected = [float(parts[index]) for index in range(25)]
    found = ls.predict(torch.nn.Identity(), parts, batch_size=6, devices=["cpu", "cpu"])
    assert found.flatten().tolist() == expected


def test_a_reader_keeps_the_blocks_in_use_only() -> None:
    parts = Parts([Numbers("a", [8] * 400)], num_sections=4)
    batches = ls.BatchIterator(parts, 16, shuffle=True)
    most = 0
    while batches.epoch < 1:
        list(next(batches))
        most = max(most, len(batches._reader._blocks))  # type: ignore[attr-defined]
    assert most <= 12
    assert num_reads(parts) >= 39  # of 400


def test_sections_that_two_processes_read_are_named() -> None:
    batches = ls.BatchIterator(some_parts(num_sections=3), 16)
    batches.load_only(lambda _, size: [range(size // 2)])
    with pytest.warns(UserWarning, match=r"`num_sections` should be a multiple .* got 3 for 16 samples: 1 of"):
        batches.peek()


def lines(folder: Path, *texts: str, **options: Any) -> Parts:
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_bytes(text.encode())
    return Parts([TextLines(folder / f"{index}.txt", block=3) for index in range(len(texts))], **options)


def positive(line: str) -> float:
    if not line.strip():
        raise ValueError("The line is empty.")
    return float(line) + float(torch.rand(()))


def test_bad_records_are_named(tmp_path: Path) -> None:
    parts = lines(tmp_path, "1\n2\n\n4\n", transform=positive)
    with pytest.raises(match=r"Record 2 in block 0 of .*0.txt is bad: ValueError: The line is empty."):
        list(ls.BatchIterator(parts, 4).peek())


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_skipped_and_counted(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    parts = lines(tmp_path, "1\n2\n\n4\nx\n6\n7\n", transform=positive, on_bad_record="skip", num_sections=2)
    batches = ls.BatchIterator(parts, 7, num_workers=workers, seed=5, repeat=False)
    with caplog.at_level(logging.WARNING):
        found = [int(sample) for sample in batches.peek()]
    batches.finalize()
    assert found == [1, 2, 1, 4, 6, 6, 7]
    assert parts.num_skipped == 2
    assert parts.num_skipped_by_all(ls.LocalCommunicator()) == 2
    if workers == 0:
        assert "Record 1 in block 1 of" in caplog.text


def test_a_block_of_bad_records_is_an_error(tmp_path: Path) -> None:
    parts = lines(tmp_path, "\n\n\n1\n", transform=positive, on_bad_record="skip")
    with pytest.raises(match=r"All 3 records in block 0 of .*0.txt are bad."):
        parts[0]


def test_a_slow_part_is_named_while_it_is_read() -> None:
    named = threading.Event()

    class Hanging(Numbers):
        def read(self, block: int) -> Sequence[Any]:
            assert named.wait(100)
            return super().read(block)

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            named.set()

    messages: list[str] = []
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler := Telling())
    try:
        with pytest.warns(UserWarning, match=r"Reading block 0 of far away took .* s\. Copy it to a faster disk"):
            assert Parts([Hanging("far away", [2])], slow_after=0.01)[1] == ("far away", 0, 1)
    finally:
        logger.removeHandler(handler)
    assert messages == ["Still reading block 0 of far away after 0.01 s."]


def test_a_lost_part_is_named(tmp_path: Path) -> None:
    parts = lines(tmp_path, "1\n2\n")
    assert len(parts) == 2
    (tmp_path / "0.txt").unlink()
    with pytest.raises(match=r"Cannot read block 0 of .*0.txt: FileNotFoundError"):
        parts[0]


def test_a_part_that_ends_early_is_named() -> None:
    class Short(Numbers):
        def read(self, block: int) -> Sequence[Any]:
            return super().read(block)[:-1]

    with pytest.raises(match=r"block 1 of b must hold 3 samples as when it was counted, got 2"):
        Parts([Short("a", [2]), Short("b", [1, 3])])[5]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="`parts` must hold at least one part"):
        Parts([])
    with pytest.raises(TypeError, match=r"`parts` must hold parts such as lockstep.data.TextLines, got a str"):
        Parts(["a.txt"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"`parts` must be a list of parts, got a Numbers"):
        Parts(Numbers("a", [1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`parts` must have an index each, got i.json as that of a.txt and b.txt"):
        Parts([TextLines("a.txt", index="i.json"), TextLines("b.txt", index=Path("i.json"))])
    with pytest.raises(ValueError, match="`on_bad_record` must be 'raise' or 'skip'"):
        some_parts(on_bad_record="ignore")
    with pytest.raises(ValueError, match="`slow_after` must be above 0, got"):
        some_parts(slow_after=0)
    with pytest.raises(ValueError, match="`num_sections` must be at least 1"):
        some_parts(num_sections=0)
    with pytest.raises(IndexError, match=r"`index` must lie in 0..264"):
        some_parts()[265]
    with pytest.raises(ValueError, match="`dataset` must hold at least one sample"):
        ls.BatchIterator(Parts([Numbers("a", [])]), 4)


def numbered() -> Iterator[str]:
    """Yield 100,000 texts of 100 characters."""
    for number in range(100_000):
        yield f"{number:0100}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "stream"])
def test_memory_stays_flat_over_200_000_samples(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{text}\n" for text in numbered()))
    part = TextLines(path, block=200) if kind == "lines" else StreamPart(numbered, "numbers", block=200)
    batches = ls.BatchIterator(Parts([part], num_sections=8), 400, shuffle=True, sample_streams=False)
    found = []
    tracemalloc.start()
    try:
        for count in range(500):
            batch = list(next(batches))
            assert len(batch) == 400
            if count % 100 == 99:
                del batch
                found.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert batches.epoch == 2
    # 40,000 samples of 100 bytes would be 4 MB more each time.
    assert max(found[1:]) < found[0] + 500_000
