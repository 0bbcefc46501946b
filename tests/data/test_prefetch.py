"""Workers change when and where samples are loaded, never which, nor the state."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data import BatchIterator, Samples, collate
from lockstep.data.workers import fetch_ahead, pack, unpack
from lockstep.stopping import STOP
from tests.support.waiting import LONG

# On a machine with one core PyTorch advises against two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Ragged:
    """Samples of all sorts: ragged tensors of several dtypes, numbers, arrays and text, in nests."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tokens": torch.arange(index % 4),
            "pair": (torch.full((2, 3), index, dtype=torch.bfloat16).T, index),
            "array": np.full(2, index),
            "scalar": torch.tensor(math.nan),
            "text": f"sample {index}",
        }


class Failing:
    """A dataset with one sample that cannot be loaded while a file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5 and os.path.exists(self.path):  # noqa: PTH110 - the worker needs no more
            raise OSError("sample 5 is out of reach")
        return index


class Deaf:
    """A dataset whose second sample is never loaded, in code that no handler of Python's interrupts."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, index: int) -> int:
        if index:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            Path(self.path).touch()
            time.sleep(3600)
        return index


class ManyTensors:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.zeros(3)


@contextmanager
def closing(batches: BatchIterator) -> Iterator[BatchIterator]:
    try:
        yield batches
    finally:
        batches.finalize()
        for child in multiprocessing.active_children():
            child.join(60)  # told to end, or ended by a signal
        assert multiprocessing.active_children() == []


def text(value: Any) -> str:
    """Write everything about a sample: types, dtypes, shapes, values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.tolist()}"
    if isinstance(value, dict):
        return str({key: text(part) for key, part in value.items()})
    if isinstance(value, tuple | list):
        return f"{type(value)}{[text(part) for part in value]}"
    return f"{type(value)}{value}"


def steps(batches: BatchIterator, count: int) -> list[tuple[Any, ...]]:
    found = []
    for _ in range(count):
        batch = next(batches)
        found.append((list(batch.indices), [text(sample) for sample in batch], batches.state_dict()))
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_gives_the_same(num_workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "last_batch": "short"}
    expected = BatchIterator(Ragged(10), 4, **options)
    with closing(BatchIterator(Ragged(10), 4, num_workers=num_workers, **options)) as batches:
        before = torch.get_rng_state()
        assert steps(batches, 5) == steps(expected, 5)
        assert text(batches.peek(2)[1:3].fetch()) == text(expected.peek(2)[1:3].fetch())
        batches.advance(2)
        expected.advance(2)
        assert multiprocessing.active_children() != []

        state = batches.state_dict()
        rest = steps(batches, 2)
        batches.load_state_dict(state)
        assert steps(batches, 2) == rest == steps(expected, 2)

        batches.reset()
        expected.reset()
        assert steps(batches, 2) == steps(expected, 2)

        batches.finalize()
        assert multiprocessing.active_children() == []
        assert steps(batches, 2) == steps(expected, 2)
        assert torch.equal(torch.get_rng_state(), before)


def test_workers_load_ahead_and_slices_do_not_load_again() -> None:
    with closing(BatchIterator(Ragged(6), 3, num_workers=1)) as batches:
        batch = next(batches)
        assert isinstance(batch, Samples)
        assert batch[1:].fetched is not None
        assert collate([sample["pair"] for sample in batch[1:]])[1].tolist() == [1, 2]


def test_the_end_with_workers() -> None:
    with closing(BatchIterator(range(5), 2, repeat=False, num_workers=2)) as batches:
        assert [list(batch) for batch in batches] == [[0, 1], [2, 3], [4]]
        with pytest.raises(StopIteration):
            next(batches)
        assert (batches.epoch, batches.previous_epoch_detail) == (1, 1.0)
        batches.reset()
        assert list(next(batches)) == [0, 1]


def test_an_error_in_a_worker_leaves_the_iterator_where_it_was(tmp_path: Any) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    with closing(BatchIterator(Failing(str(obstacle)), 4, num_workers=2)) as batches:
        next(batches)
        state = batches.state_dict()
        for _ in range(2):
            with pytest.raises(OSError, match="sample 5 is out of reach"):
                next(batches)
            assert batches.state_dict() == state
        obstacle.unlink()
        assert [list(next(batches)) for _ in range(3)] == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]


def test_shielded_workers_end_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # For this long PyTorch waits for a worker before and after it sends SIGTERM.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    path = tmp_path / "loading"
    assert STOP.install(alone=True)
    batches = fetch_ahead(Deaf(str(path)), iter([[0], [1]]), num_workers=1, seed=0)  # type: ignore[arg-type]
    try:
        assert next(batches) == [0]
        while not path.exists():
            time.sleep(0.01)
    finally:
        # In the order of a Trainer: the Snapshot extension is finalized before the updater and its iterators.
        STOP.uninstall()
    workers = multiprocessing.active_children()
    try:
        batches.close()  # type: ignore[attr-defined]
        for worker in workers:
            worker.join(LONG)
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_many_tensors_need_few_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        with closing(BatchIterator(ManyTensors(), 200, num_workers=1)) as batches:
            kept = [next(batches) for _ in range(4)]
            assert collate(kept[3])[0].tolist() == list(range(200, 400))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(0, 3),
        torch.tensor(5, dtype=torch.int8),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.zeros(3).expand(4, 3),
        torch.eye(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        (torch.tensor(True), "text", None, {"x": [torch.tensor(1.5)]}),
    ],
)
def test_a_packed_sample_comes_back_as_it_was(sample: Any) -> None:
    def dense(value: Any) -> Any:
        return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value

    one, other = unpack(pack([sample, sample]))
    assert type(one) is type(sample)
    assert text(dense(one)) == text(dense(other)) == text(dense(sample))
    if isinstance(sample, torch.Tensor):
        assert one.requires_grad == sample.requires_grad
        assert one.layout == sample.layout


def test_packed_tensors_do_not_overlap() -> None:
    tensors = unpack(pack([torch.full((size,), 1.0) for size in range(40)]))
    for tensor in tensors:
        tensor.zero_()
        assert sum(float(other.sum()) for other in tensors) == sum(map(len, tensors[len(tensor) + 1 :]))


class Changing:
    """A dataset whose samples depend on attributes of several kinds."""

    def __init__(self) -> None:
        self.epoch = 0
        self.transform: Any = Scale(1)
        self.offset = torch.zeros(1)
        self.names = {"a": [0]}
        self.options, self.array, self.recent = Options(), np.zeros(2), deque([0], maxlen=1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        kept = self.options.value + self.array[1] + self.recent[0]
        return float(self.transform(index) + 100 * self.epoch + self.offset.item() + self.names["a"][0] + kept)


@dataclass(slots=True)
class Options:
    value: int = 0


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor


def change_epoch(dataset: Changing) -> None:
    dataset.epoch += 1


def change_transform(dataset: Changing) -> None:
    dataset.transform = Scale(dataset.transform.factor + 1)


def change_attribute_of_transform(dataset: Changing) -> None:
    dataset.transform.factor += 1


def change_tensor(dataset: Changing) -> None:
    dataset.offset.add_(0.5)


def change_list(dataset: Changing) -> None:
    dataset.names["a"][0] += 7


def change_options(dataset: Changing) -> None:
    dataset.options.value += 1


def change_data(dataset: Changing) -> None:
    dataset.offset.data.add_(0.25)


def change_array(dataset: Changing) -> None:
    dataset.array[:] += 1


def change_deque(dataset: Changing) -> None:
    dataset.recent.append(dataset.recent[0] + 1)


CHANGES = [
    *(change_epoch, change_transform, change_attribute_of_transform, change_tensor, change_list),
    *(change_options, change_data, change_array, change_deque),
]


@pytest.mark.each_value
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wraps", [False, True])
def test_workers_load_from_a_dataset_that_has_changed(change: Any, wraps: bool) -> None:
    read = []
    for num_workers in (0, 1):
        dataset = Changing()
        given: Any = torch.utils.data.Subset(dataset, range(8)) if wraps else dataset
        batches = BatchIterator(given, 2, num_workers=num_workers)
        found = []
        for update in range(10):
            # Between epochs, and in the middle of one.
            if update in {4, 5, 8}:
                change(dataset)
            found.append(list(batches.peek()))
            batches.advance()
        batches.finalize()
        read.append(found)
    assert read[1] == read[0]


def test_workers_go_on_while_the_dataset_stays() -> None:
    batches = BatchIterator(Changing(), 2, num_workers=1)
    seen = set()
    for _ in range(6):
        batches.peek()
        seen.add(frozenset(worker.pid for worker in multiprocessing.active_children()))
        batches.advance()
    batches.finalize()
    assert len(seen) == 1
