"""What a dataset draws belongs to the sample: no worker, device, batch or neighbour changes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep as ls
from lockstep.data import BatchIterator, Samples
from lockstep.data.samples import SampleStreams
from lockstep.streams import StreamOverride, shard_stream, stream_seed

# On a machine with one core PyTorch advises against two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Noisy:
    """Draws from everything that a dataset may draw from, unevenly, so that order would matter."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        drawn = [float(torch.rand(1 + index % 3)[-1]) for _ in range(1 + index % 2)]
        numbers = np.random.rand(1 + index % 2)
        return index, drawn[-1], random.random(), float(numbers[-1])  # noqa: S311 - no secret


class NoisyMany(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise AssertionError(f"samples {indices} cannot each have a stream in one go")


def positions() -> tuple[object, ...]:
    """Say where the generators stand."""
    numbers = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2:]  # type: ignore[index]  # a tuple unless asked otherwise


@pytest.fixture(autouse=True)
def generators_are_left_alone() -> Iterator[None]:
    before = positions()
    yield
    assert positions() == before


def by_epoch_and_sample(batches: BatchIterator, count: int) -> dict[tuple[int, int], Any]:
    """Load batches; the n-th sample of all is of epoch n // length."""
    found: dict[tuple[int, int], Any] = {}
    passed = 0
    for _ in range(count):
        for sample in next(batches):
            found[passed // len(batches.dataset), sample[0]] = sample
            passed += 1
    return found


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"last_batch": "short"}, {"num_workers": 2}])
def test_a_stream_follows_from_the_seed_the_epoch_and_the_sample(options: dict[str, Any]) -> None:
    reference = by_epoch_and_sample(BatchIterator(Noisy(10), 1), 30)
    batches = BatchIterator(Noisy(10), 5 if "last_batch" in options else 4, **{"last_batch": "wrap"} | options)
    found = by_epoch_and_sample(batches, 6)
    batches.finalize()
    assert len(found) >= 24
    assert all(reference[key] == sample for key, sample in found.items())


def test_no_two_samples_epochs_or_seeds_share_a_stream() -> None:
    batches = [BatchIterator(Noisy(9), 6, seed=seed, last_batch="wrap") for seed in (0, 1, -1, 2**64, -(2**64))]
    found = [sample[1:] for each in batches for sample in by_epoch_and_sample(each, 6).values()]
    assert len(set(found)) == len(found) == 5 * 36
    shards = {stream_seed(0, position) for position in range(36)}
    assert shards.isdisjoint(seed for _, seed in SampleStreams(0, 9, range(36)).keys([*range(9)] * 4))


def test_items_slices_and_iteration_agree() -> None:
    batch = BatchIterator(Noisy(10), 7, shuffle=True).peek()
    whole = batch.fetch()
    assert list(batch) == whole
    assert [batch[place] for place in (3, 0, -1)] == [whole[3], whole[0], whole[-1]]
    assert batch[2:6][1:].fetch() == whole[3:6]
    assert batch[::-2].fetch() == whole[::-2]
    with pytest.raises(IndexError):
        batch[7]


def test_a_batch_over_several_epochs() -> None:
    long = BatchIterator(Noisy(4), 10, last_batch="wrap").peek().fetch()
    single = BatchIterator(Noisy(4), 1)
    assert long == [next(single)[0] for _ in range(10)]
    assert len(set(long)) == 10


def test_a_state_loaded_in_the_middle_goes_on_with_the_same_numbers() -> None:
    batches = BatchIterator(Noisy(10), 4, shuffle=True, seed=5)
    next(batches)
    state = batches.state_dict()
    rest = [next(batches).fetch() for _ in range(4)]
    resumed = BatchIterator(Noisy(10), 4, shuffle=True, num_workers=1)
    resumed.load_state_dict(state)
    assert [next(resumed).fetch() for _ in range(4)] == rest
    resumed.reset()
    batches.reset()
    assert next(resumed).fetch() == next(batches).fetch()
    resumed.finalize()


def test_an_error_of_the_dataset_leaves_the_generators_alone() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise OSError(index)

    with pytest.raises(OSError, match="0"):
        BatchIterator(Broken(3), 2).peek().fetch()


def test_samples_are_loaded_one_by_one_where_each_has_a_stream() -> None:
    assert BatchIterator(NoisyMany(4), 2).peek().fetch() == BatchIterator(Noisy(4), 2).peek().fetch()
    with pytest.raises(AssertionError, match=r"samples \[0, 1\]"):
        BatchIterator(NoisyMany(4), 2, sample_streams=False).peek().fetch()


@pytest.mark.parametrize(
    ("dataset", "streamed"),
    [
        (TensorDataset(torch.zeros(3)), False),
        (Subset(TensorDataset(torch.zeros(3)), [0, 1]), False),
        ([1, 2, 3], False),
        (Subset(Noisy(3), [0, 1]), True),
        (Noisy(3), True),
    ],
)
def test_streams_are_for_datasets_that_may_draw(dataset: Any, streamed: bool) -> None:
    assert (BatchIterator(dataset, 2).peek().streams is not None) is streamed
    assert BatchIterator(dataset, 2, sample_streams=False).peek().streams is None


def test_inside_a_shard_the_shards_own_stream_stays_where_it_is() -> None:
    expected = BatchIterator(Noisy(3), 3).peek().fetch()
    with StreamOverride(), shard_stream(3):
        before = torch.get_rng_state()
        assert BatchIterator(Noisy(3), 3).peek().fetch() == expected
        assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_for_each_index() -> None:
    with pytest.raises(ValueError, match="`streams` must hold one stream for each of `indices`, got 3 for 2"):
        Samples(Noisy(4), (0, 1), streams=SampleStreams(0, 4, range(3)))


class NoisyInputs(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # other samples
        return torch.randn(3) + index, torch.tensor(float(index))


def train(*, devices: int, num_workers: int = 0, **options: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0))
    updater = ls.ParallelUpdater(
        BatchIterator(NoisyInputs(10), 4, shuffle=True, num_workers=num_workers, **options),
        torch.optim.SGD(model.parameters(), lr=0.01),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    try:
        for _ in range(6):
            updater.update()
        return ls.digest(model)
    finally:
        updater.finalize()


def test_an_augmented_run_has_the_same_bits_at_every_placement() -> None:
    before = positions()
    digests = {train(devices=devices) for devices in (1, 2, 3)} | {train(devices=2, num_workers=2)}
    assert len(digests) == 1
    other = {train(devices=1, num_workers=workers, sample_streams=False) for workers in (0, 1)}
    assert len(other | digests) == 3  # the law is not empty
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
