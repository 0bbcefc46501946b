"""Iterables that can be opened again as parts of a dataset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import lockstep as ls
from lockstep.data import Parts, StreamPart
from tests.support.counted_files import num_bytes_read, open_counted


class Counting(IterableDataset[int]):
    """Counts, and notes what is read in a list."""

    def __init__(self, numbers: range, read: list[int]) -> None:
        self.numbers, self.read = numbers, read

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            self.read.append(number)
            yield number


class Dividing(Counting):
    """Divides its numbers between the workers of a loader, as PyTorch's documentation advises."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]


class Seekable(Counting):
    """Continues from a state."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self.numbers):
            self.read.append(self.numbers[self.position])
            self.position += 1
            yield self.numbers[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("kind", [Counting, Seekable])
@pytest.mark.parametrize("size", [0, 1, 10, 12, 13])
def test_blocks_are_read_in_order_without_a_new_start(kind: type[Counting], size: int, tmp_path: Path) -> None:
    read: list[int] = []
    part = StreamPart(partial(kind, range(size), read), "numbers", block=4, index=tmp_path / "a.json")
    assert sum(part.lengths) == size
    # The last block is found by its state once, to compare the samples.
    checked = list(range((size - 1) // 4 * 4, size)) if kind is Seekable and size > 4 else []
    assert read == [*range(size), *checked]
    read.clear()
    blocks = [part.read(block) for block in range(len(part.lengths))]
    assert [number for block in blocks for number in block] == list(range(size))
    assert read == list(range(size))
    again = StreamPart(partial(kind, range(size), read), "numbers", block=4, index=tmp_path / "a.json")
    assert again.lengths == part.lengths
    assert len(read) == size


@pytest.mark.parametrize(("kind", "expected"), [(Counting, list(range(12))), (Seekable, [8, 9, 10, 11])])
def test_a_block_is_found_by_a_state_or_from_the_start(
    kind: type[Counting], expected: list[int], tmp_path: Path
) -> None:
    read: list[int] = []
    StreamPart(partial(kind, range(30), []), "numbers", block=4, index=tmp_path / "a.json").lengths  # noqa: B018
    part = StreamPart(partial(kind, range(30), read), "numbers", block=4, index=tmp_path / "a.json")
    block = part.read(2)
    assert block == [8, 9, 10, 11]
    assert read == expected
    assert part.read(3) == [12, 13, 14, 15]
    assert read == [*expected, 12, 13, 14, 15]
    # The block before is in use no more, and the iterator is closed.
    del block
    read.clear()
    part.read(3)
    assert read == ([12, 13, 14, 15] if kind is Seekable else list(range(16)))


@pytest.mark.parametrize("num_sections", [4, 40])
@pytest.mark.parametrize("kind", [Counting, Seekable])
def test_sections_within_a_part_have_positions_of_their_own(kind: type[Counting], num_sections: int) -> None:
    read: list[int] = []
    parts = Parts([StreamPart(partial(kind, range(800), read), "numbers", block=5)], num_sections=num_sections)
    batches = ls.BatchIterator(parts, 80, shuffle=True)
    assert read[:800] == list(range(800))  # counted
    read.clear()
    found = [number for _ in range(10) for number in next(batches)]
    assert sorted(found) == list(range(800))
    # Where there are no states, each section reads once what is before it.
    before = 0 if kind is Seekable else sum(range(0, 800, 800 // num_sections))
    assert len(read) <= 800 + num_sections * 5 + before


@pytest.mark.parametrize(("kind", "workers"), [(Counting, 0), (Dividing, 2)])
def test_a_resume_continues_with_workers(kind: type[Counting], workers: int) -> None:
    def batches(num_workers: int) -> ls.BatchIterator:
        parts = [StreamPart(partial(kind, range(at, at + 57 + at), []), f"part {at}", block=4) for at in (0, 100)]
        return ls.BatchIterator(Parts(parts, num_sections=4), 8, shuffle=True, num_workers=num_workers)

    whole = batches(0)
    expected = [list(next(whole)) for _ in range(40)]
    first = batches(workers)
    assert [list(next(first)) for _ in range(13)] == expected[:13]
    second = batches(2 - workers)
    second.load_state_dict(first.state_dict())
    assert [list(next(second)) for _ in range(27)] == expected[13:]
    first.finalize()
    second.finalize()


def test_a_part_that_ends_early_is_named(tmp_path: Path) -> None:
    StreamPart(partial(Counting, range(30), []), "numbers", index=tmp_path / "a.json").lengths  # noqa: B018
    part = StreamPart(partial(Counting, range(29), []), "numbers", index=tmp_path / "a.json")
    with pytest.raises(match="block 0 of numbers must hold 30 samples as when it was counted, got 29"):
        Parts([part])[0]


class Shuffling(Counting):
    """Shuffles with the generator of the process."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(self.numbers, len(self.numbers)))


class Jittering(Counting):
    """Draws a number for each sample."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            yield number + random.random()  # noqa: S311 - no secret


class Buffering(Seekable):
    """Shuffles in a buffer, which is not in its state."""

    def __iter__(self) -> Iterator[int]:
        generator, buffer = random.Random(0), list[int]()  # noqa: S311 - no secret
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 10:
                yield buffer.pop(generator.randrange(10))
        yield from buffer


@pytest.mark.parametrize("kind", [Shuffling, Jittering, Buffering])
def test_an_iterable_that_yields_other_samples_is_refused_before_the_first_batch(kind: type[Counting]) -> None:
    parts = Parts([StreamPart(partial(kind, range(50), []), "shuffled", block=6)])
    with pytest.raises(ls.errors.PartError, match=r"Cannot read .*shuffled.*: It yields other samples than when"):
        ls.BatchIterator(parts, 8, seed=1).peek()[0]


def test_what_an_iterable_draws_does_not_move_the_streams_of_samples() -> None:
    class Drawing(Counting):
        def __iter__(self) -> Iterator[int]:
            for number in self.numbers:
                torch.rand(random.randrange(5))  # noqa: S311 - no secret
                yield number

    def batches() -> ls.BatchIterator:
        parts = Parts(
            [StreamPart(partial(Drawing, range(40), []), "drawing", block=8)], num_sections=2, transform=jittered
        )
        return ls.BatchIterator(parts, 4, shuffle=True, seed=4)

    def jittered(number: int) -> float:
        return number + float(torch.rand(()))

    whole, resumed = batches(), batches()
    expected = [list(next(whole)) for _ in range(10)]
    first = batches()
    first.advance(3)
    resumed.load_state_dict(first.state_dict())
    assert [list(next(resumed)) for _ in range(7)] == expected[3:]


def broken(after: int) -> Iterator[int]:
    yield from range(after)
    raise OSError("The connection was closed.")


def test_a_source_that_fails_is_named() -> None:
    parts = Parts([StreamPart(partial(range, 5), "good"), StreamPart(partial(broken, 5), "bad")])
    with pytest.raises(ls.errors.PartError, match=r"Cannot read bad to count its samples: OSError: The connection was"):
        ls.BatchIterator(parts, 4)
    sources = iter([range(5), broken(3)])
    parts = Parts([StreamPart(lambda: next(sources), "bad later")])
    assert len(parts) == 5
    with pytest.raises(ls.errors.PartError, match=r"Cannot read block 0 of bad later: OSError: The connection was"):
        parts[0]


@pytest.mark.parametrize("given", [Counting(range(3), []), range(3), iter([1])])
def test_an_iterable_in_place_of_a_function_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="`open_iterable` must be a function that returns a new iterable"):
        StreamPart(given, "numbers")


class Lines:
    """The lines of a file, which is read in pieces of 64 bytes and continues from a state."""

    def __init__(self, log: Path, path: Path) -> None:
        self.log, self.path, self.position = log, path, 0

    def __iter__(self) -> Iterator[str]:
        with open_counted(self.log, str(self.path)) as file:
            file.seek(self.position)
            text = b""
            while piece := file.read(64):
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    self.position += len(line) + 1
                    yield line.decode()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("size", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 4))])
def test_all_ranks_together_read_a_stream_once_and_little_again_after_a_resume(size: int, tmp_path: Path) -> None:
    (log := tmp_path / "log").mkdir()
    for file in range(3):
        (tmp_path / f"{file}.txt").write_text("".join(f"{file}-{line:0100}\n" for line in range(700)))
    data = sum((tmp_path / f"{file}.txt").stat().st_size for file in range(3))

    def batches() -> ls.BatchIterator:
        parts = [
            StreamPart(
                partial(Lines, log, tmp_path / f"{file}.txt"), f"{file}", block=5, index=tmp_path / f"{file}.index"
            )
            for file in range(3)
        ]
        return ls.BatchIterator(Parts(parts, num_sections=12), 12, shuffle=True)

    def num_bytes(start: int, end: int) -> int:
        """Return what all ranks together read if they begin with a batch."""
        before = num_bytes_read(log)
        for rank in range(size):
            mine = batches()
            if start:
                mine.load_state_dict(passed.state_dict())
            for _ in range(start, end):
                batch = next(mine)
                for position in range(12 * rank // size, 12 * (rank + 1) // size):
                    batch[position]
            mine.finalize()
        return num_bytes_read(log) - before

    passed = batches()
    passed.advance(90)
    assert len(passed) == 175
    assert data <= (whole := num_bytes(0, 175)) <= 1.05 * data
    # A block of each section, and the piece in which it begins.
    assert num_bytes(0, 90) + num_bytes(90, 175) - whole <= 12 * (5 * 104 + 2 * 64)
