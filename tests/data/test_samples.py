"""Samples load what is asked for, when it is asked for, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lockstep.data import Samples


class Recording:
    """A dataset that remembers what it was asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        self.asked.append(index)
        return f"sample {index}"


class ManyAtOnce(Recording):
    def __init__(self, length: int, lost: int = 0) -> None:
        super().__init__(length)
        self.lost = lost
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[str]:
        self.calls.append(indices)
        return [f"sample {index}" for index in indices[self.lost :]]


def test_slices_load_nothing_and_items_load_one() -> None:
    dataset = Recording(10)
    samples = Samples(dataset, [7, 1, 4, 1])
    tail = samples[1:][1:]
    assert len(samples) == 4
    assert tail.indices == (4, 1)
    assert dataset.asked == []
    assert samples[-1] == "sample 1"
    assert tail[0] == "sample 4"
    assert dataset.asked == [1, 4]


def test_fetch_and_iteration_load_each_once_in_order() -> None:
    dataset = Recording(10)
    samples = Samples(dataset, range(2, 8, 3))
    assert samples.fetch() == list(samples) == ["sample 2", "sample 5"]
    assert dataset.asked == [2, 5, 2, 5]


def test_fetch_asks_for_all_at_once_where_the_dataset_can() -> None:
    dataset = ManyAtOnce(10)
    assert Samples(dataset, (3, 0))[:1].fetch() == ["sample 3"]
    assert dataset.calls == [[3]]
    assert dataset.asked == []


def test_a_dataset_that_loses_samples_is_refused() -> None:
    rule = r"`ManyAtOnce.__getitems__` must return one sample for each of the 3 indices, got 2\."
    with pytest.raises(ValueError, match=rule):
        Samples(ManyAtOnce(10, lost=1), [3, 0, 1]).fetch()


def test_fetched_samples_are_not_loaded_again() -> None:
    dataset = Recording(10)
    samples = Samples(dataset, (3, 0, 4), ["c", "a", "d"])
    assert (samples[0], samples[1:].fetch(), list(samples[::2])) == ("c", ["a", "d"], ["c", "d"])
    assert samples[1:].indices == (0, 4)
    assert dataset.asked == []
    with pytest.raises(ValueError, match="`fetched` must hold one sample for each of `indices`, got 1 for 2"):
        Samples(dataset, (3, 0), ["c"])


def test_an_index_error_of_the_dataset_is_no_end() -> None:
    with pytest.raises(IndexError):
        list(Samples([1, 2], [0, 5]))


def test_samples_are_frozen() -> None:
    indices = [1, 2]
    samples = Samples("abc", indices)
    indices[0] = 0
    assert list(samples) == ["b", "c"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        samples.indices = (0,)  # type: ignore[misc]  # that it is refused is the point
    assert repr(samples) == "Samples(str, (1, 2))"


def test_indices_become_integers() -> None:
    samples = Samples("abc", torch.tensor([2, 0]))  # type: ignore[arg-type]  # not declared, yet accepted
    assert samples.indices == (2, 0)
    assert all(type(index) is int for index in samples.indices)
    with pytest.raises(TypeError):
        Samples("abc", [0.5])  # type: ignore[list-item]  # that it is refused is the point
