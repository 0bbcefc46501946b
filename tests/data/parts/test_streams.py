"""Iterables that can be opened again as parts of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import lockstep as ls
from lockstep.data import Parts, StreamPart
from tests.data.parts.test_files import everything


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
    assert everything(part) == list(range(size))
    assert read == 2 * list(range(size))
    again = StreamPart(partial(kind, range(size), read), "numbers", block=4, index=tmp_path / "a.json")
    assert again.lengths == part.lengths
    assert len(read) == 2 * size


@pytest.mark.parametrize(("kind", "expected"), [(Counting, list(range(12))), (Seekable, [8, 9, 10, 11])])
def test_a_block_is_found_by_a_state_or_from_the_start(
    kind: type[Counting], expected: list[int], tmp_path: Path
) -> None:
    read: list[int] = []
    StreamPart(partial(kind, range(30), []), "numbers", block=4, index=tmp_path / "a.json").lengths  # noqa: B018
    part = StreamPart(partial(kind, range(30), read), "numbers", block=4, index=tmp_path / "a.json")
    assert part.read(2) == [8, 9, 10, 11]
    assert read == expected
    assert part.read(3) == [12, 13, 14, 15]
    assert read == [*expected, 12, 13, 14, 15]


def test_sections_within_a_part_have_positions_of_their_own() -> None:
    read: list[int] = []
    parts = Parts([StreamPart(partial(Seekable, range(400), read), "numbers", block=5)], num_sections=4)
    batches = ls.BatchIterator(parts, 8, shuffle=True)
    assert read == list(range(400))  # counted
    found = [number for _ in range(50) for number in next(batches)]
    assert sorted(found) == list(range(400))
    assert len(read) <= 800 + 4 * 5


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
