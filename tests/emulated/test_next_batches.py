"""Batches are copied to accelerators one update ahead, on streams of their own, and no result changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
from lockstep.replicas import CopyStreams
from lockstep.updaters.step import engine
from lockstep.updaters.step.next_batches import NextBatches
from tests.support.emulated import Record, observed
from tests.support.emulated.pool import on_emulated_devices
from tests.support.runs import OPTIMIZERS, cross_entropy, finalized
from tests.support.workloads import MLP

ONE_CPU = ("cpu",)
DEVICES = ("emulated:0", "emulated:1")
NUM_UPDATES = 7
COPIED = [False, *[True] * (NUM_UPDATES - 1)]
"""Which updates find their tensors copied: all but the first."""


class Loaded(Dataset[Any]):
    """A dataset whose samples are loaded by a call, which may fail or draw random numbers."""

    def __init__(self, fails_at: int | None = None, *, draws: bool = False) -> None:
        self.samples: Any = MLP.data(12)
        self.fails_at = fails_at
        self.draws = draws

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError(f"sample {index} is damaged")
        inputs, target = self.samples[index]
        return inputs + torch.rand(()) if self.draws else inputs, target


def updater_of(batches: Any, devices: tuple[str, ...] = DEVICES, **options: Any) -> ls.ParallelUpdater:
    model = MLP.model().to(devices[0])
    options = {"loss_fn": cross_entropy, "num_shards": 3} | options
    return ls.ParallelUpdater(batches, OPTIMIZERS["fused"](model), model, devices=list(devices), **options)


def digest_of(updater: ls.ParallelUpdater) -> str:
    return ls.digest(updater.get_all_models()["main"], updater.get_optimizer("main"))


def train(updater: ls.ParallelUpdater, updates: int = NUM_UPDATES) -> tuple[str, Record]:
    """Train, and return the digest of the state and what the devices observed, without waits of the first update."""
    with finalized(updater):
        with observed() as record:
            updater.update()
            record.waits.clear()
            for _ in range(updates - 1):
                updater.update()
        return digest_of(updater), record


@contextmanager
def recorded() -> Iterator[list[bool]]:
    """Return a list to which each attempt appends whether its tensors had been copied ahead."""

    def take(self: NextBatches, *arguments: Any) -> Any:
        shards = original(self, *arguments)
        found.append(shards is not None)
        return shards

    found: list[bool] = []
    original = NextBatches.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextBatches, "take", take)
        yield found


def batches_of(kind: str) -> Any:
    """Return 12 samples in batches of 5, 5 and 2, from one of several sources."""
    if kind == "BatchIterator with workers":
        return ls.BatchIterator(Loaded(), 5, shuffle=True, seed=3, num_workers=1)
    if kind == "BatchIterator":
        return ls.BatchIterator(MLP.data(12), 5, shuffle=True, seed=3)
    if kind == "DataLoader with workers":
        return DataLoader(Loaded(), 5, num_workers=1)
    if kind == "samples of a DataLoader with workers":
        return ls.data.IterableBatches(DataLoader(Loaded(), 5, num_workers=1, collate_fn=list), batches_of="samples")
    if kind == "DataLoader":
        return DataLoader(Loaded(), 5)
    batches = list(DataLoader(Loaded(), 5))
    return batches if kind == "list" else (batch for _ in range(NUM_UPDATES) for batch in batches)


# The start of an epoch of a DataLoader is never read early, and has every third batch here.
FROM_LOADERS = [index % 3 != 0 for index in range(NUM_UPDATES)]
SOURCES: list[Any] = [
    ("BatchIterator with workers", "auto", COPIED),
    pytest.param("BatchIterator with workers", False, [], marks=pytest.mark.slow),
    ("BatchIterator", "auto", [False] * NUM_UPDATES),
    ("BatchIterator", True, COPIED),
    ("DataLoader with workers", "auto", FROM_LOADERS),
    pytest.param("samples of a DataLoader with workers", "auto", FROM_LOADERS, marks=pytest.mark.slow),
    ("DataLoader", "auto", [False] * NUM_UPDATES),
    ("DataLoader", True, FROM_LOADERS),
    ("list", "auto", [False] * NUM_UPDATES),
    ("generator", "auto", [False] * NUM_UPDATES),
    ("generator", True, COPIED),
]


@on_emulated_devices
@pytest.mark.parametrize(("kind", "copy_ahead", "copied"), SOURCES)
def test_copies_ahead_change_no_bit(kind: str, copy_ahead: Any, copied: list[bool]) -> None:
    expected, _ = train(updater_of(batches_of(kind), ONE_CPU))
    with recorded() as found:
        digest, record = train(updater_of(batches_of(kind), copy_ahead=copy_ahead, on_overflow="skip"))
    assert digest == expected
    assert found == copied
    assert not record.waits, record.waits_by_file()
    assert not record.races, record.races


def tripled(samples: Any, device: torch.device) -> Any:
    inputs, target = ls.collate(samples, device)
    return inputs * 3, target


@on_emulated_devices
@pytest.mark.parametrize(
    ("converter", "copy_ahead", "copied"),
    [(partial(ls.collate, padding=0), "auto", True), (tripled, "auto", False), (tripled, True, True)],
)
def test_a_converter_of_yours_is_called_early_if_you_say_so(converter: Any, copy_ahead: Any, *, copied: bool) -> None:
    kind = "BatchIterator with workers"
    expected, _ = train(updater_of(batches_of(kind), ONE_CPU, converter=converter), 3)
    with recorded() as found:
        digest, record = train(updater_of(batches_of(kind), converter=converter, copy_ahead=copy_ahead), 3)
    assert (digest, found) == (expected, [False, copied, copied])
    assert not record.races, record.races


@on_emulated_devices
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"devices": ("emulated:2",)}, marks=pytest.mark.slow),
        pytest.param({"devices": ("emulated:1", "emulated:1")}, marks=pytest.mark.slow),
        {"devices": ("emulated:2", "cpu")},
        pytest.param({"devices": ("cpu", "emulated:2")}, marks=pytest.mark.slow),
        {"accumulate": 2},
        pytest.param({"split": "strided"}, marks=pytest.mark.slow),
        {"workloads": [3.0, 1.0]},
    ],
    ids=str,
)
def test_copies_ahead_change_no_bit_at_any_place(options: dict[str, Any]) -> None:
    kind, options = "BatchIterator with workers", dict(options)
    devices = options.pop("devices", DEVICES)
    on_cpu = {name: value for name, value in options.items() if name != "workloads"}
    expected, _ = train(updater_of(batches_of(kind), ONE_CPU, **on_cpu))
    with recorded() as found:
        digest, record = train(updater_of(batches_of(kind), devices, **options))
    assert (digest, found) == (expected, COPIED)
    assert not record.races, record.races


@on_emulated_devices
@pytest.mark.parametrize("on_overflow", ["retry", "next"])
def test_an_overflow_uses_what_was_copied_for_its_batch_only(on_overflow: Any) -> None:
    def overflowing(model: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, inputs, target)
        # Above 3 where a shard has 2 of 4 samples and the loss scale is more than 4.
        loss.register_hook(lambda grad: torch.where(grad > 3.0, torch.inf, grad))
        return loss

    options = {"loss_fn": overflowing, "loss_scale": ls.DynamicLossScale(factor=16.0), "on_overflow": on_overflow}

    def batches() -> ls.BatchIterator:
        return ls.BatchIterator(Loaded(), 4, num_workers=1)

    expected, _ = train(updater_of(batches(), ONE_CPU, **options), 3)
    with recorded() as found:
        digest, record = train(updater_of(batches(), **options), 3)
    assert digest == expected
    assert not record.races, record.races
    # A retry converts its batch again, and the batch after it is still there. The next batch has been copied.
    assert found == [False, on_overflow == "next", on_overflow == "next", True, True]


@on_emulated_devices
def test_other_workloads_between_updates_use_no_stale_cut() -> None:
    def trained(devices: tuple[str, ...]) -> str:
        batches = ls.BatchIterator(Loaded(), 6, num_workers=1)
        with finalized(updater_of(batches, devices, num_shards=6)) as updater:
            for workloads in ([1.0, 1.0], [5.0, 1.0], [1.0, 5.0], [1.0, 1.0]):
                updater._training.replicas.workloads = workloads[: len(devices)]
                updater.update()
            return digest_of(updater)

    expected = trained(ONE_CPU)
    with recorded() as found:
        assert trained(DEVICES) == expected
    assert found == [False] * 4


@on_emulated_devices
@pytest.mark.parametrize(
    "kind", ["BatchIterator with workers", pytest.param("DataLoader with workers", marks=pytest.mark.slow)]
)
def test_a_state_counts_the_batches_of_updates_and_none_that_were_copied(kind: str) -> None:
    whole = updater_of(batches_of(kind))
    with finalized(whole):
        for _ in range(5):
            whole.update()
        assert whole.get_iterator().epoch_detail == 1 + (2 / 3 if "DataLoader" in kind else 10 / 12)
        state = whole.state_dict()
        whole.update()
        whole.update()
        expected = digest_of(whole)
        # Back to the saved state, with the tensors of a later batch still on the devices.
        whole.load_state_dict(state)
        whole.update()
        whole.update()
        assert digest_of(whole) == expected
    resumed = updater_of(batches_of(kind))
    resumed.load_state_dict(state)
    assert train(resumed, 2)[0] == expected


@on_emulated_devices
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["BatchIterator", "DataLoader", "shuffled DataLoader"])
@pytest.mark.parametrize("devices", [ONE_CPU, DEVICES])
def test_a_batch_that_cannot_be_loaded_raises_in_the_update_that_uses_it(kind: str, devices: tuple[str, ...]) -> None:
    data = Loaded(fails_at=7)
    batches = (
        ls.BatchIterator(data, 3, num_workers=1) if kind == "BatchIterator" else DataLoader(data, 3, num_workers=1)
    )
    with finalized(updater_of(batches, devices)) as updater:
        updater.update()
        updater.update()
        before = digest_of(updater), updater.get_iterator().epoch_detail
        with pytest.raises(ValueError, match="sample 7 is damaged"):
            updater.update()
        assert (digest_of(updater), updater.get_iterator().epoch_detail) == before
        assert updater.iteration == 2


@on_emulated_devices
@pytest.mark.parametrize("devices", [ONE_CPU, DEVICES])
def test_a_batch_that_cannot_be_converted_raises_in_the_update_that_uses_it(devices: tuple[str, ...]) -> None:
    def convert(samples: Any, device: torch.device) -> Any:
        if 7 in samples.indices:
            raise ValueError("no tensors")
        return ls.data.collate(samples, device)

    batches = ls.BatchIterator(Loaded(), 3)
    with finalized(updater_of(batches, devices, converter=convert, copy_ahead=True)) as updater:
        updater.update()
        updater.update()
        with pytest.raises(ValueError, match="no tensors"):
            updater.update()
        assert updater.iteration == 2


@on_emulated_devices
def test_the_end_of_the_data_comes_after_the_last_batch() -> None:
    batches = ls.BatchIterator(Loaded(), 5, repeat=False, num_workers=1)
    with finalized(updater_of(batches)) as updater:
        for _ in range(3):
            updater.update()
        with pytest.raises(StopIteration):
            updater.update()
        assert updater.iteration == 3


@on_emulated_devices
def test_a_converter_that_draws_is_called_early_with_the_same_numbers() -> None:
    def noisy(samples: Any, device: torch.device) -> Any:
        inputs, target = ls.data.collate(samples)
        return (inputs + torch.rand(())).to(device), target.to(device)

    def trained(devices: tuple[str, ...]) -> tuple[str, list[float]]:
        torch.manual_seed(4)
        drawn = []
        with finalized(updater_of(batches_of("BatchIterator"), devices, converter=noisy, copy_ahead=True)) as updater:
            for _ in range(4):
                updater.update()
                drawn.append(torch.rand(()).item())
            return digest_of(updater), drawn

    expected = trained(ONE_CPU)
    with recorded() as found:
        assert trained(DEVICES) == expected
    assert found == [False] + [True] * 3


@on_emulated_devices
def test_samples_that_draw_outside_of_streams_keep_their_numbers_and_are_not_loaded_early_again() -> None:
    def trained(devices: tuple[str, ...]) -> tuple[str, list[float]]:
        torch.manual_seed(4)
        drawn = []
        batches = ls.BatchIterator(Loaded(draws=True), 3, sample_streams=False)
        with finalized(updater_of(batches, devices, copy_ahead=True)) as updater:
            for _ in range(4):
                updater.update()
                drawn.append(torch.rand(()).item())
            return digest_of(updater), drawn

    expected = trained(ONE_CPU)
    with recorded() as found, pytest.warns(ls.RandomStreamWarning, match="Converting a batch draws"):
        assert trained(DEVICES) == expected
    assert found == [False] * 4


@on_emulated_devices
def test_a_source_that_draws_is_warned_of_and_not_read_early_again() -> None:
    data = DataLoader(Loaded(draws=True), 2)
    with finalized(updater_of(data, copy_ahead=True)) as updater:
        with pytest.warns(ls.RandomStreamWarning, match="Reading a batch draws"):
            updater.update()
        updater.update()
        before = torch.get_rng_state()
        peeked = updater.get_iterator().peek()
        assert not torch.equal(before, torch.get_rng_state())
        assert len(peeked[0]) == 2


@on_emulated_devices
def test_what_a_converter_returns_must_be_known_to_be_copied_early() -> None:
    class Graph:
        def __init__(self, inputs: torch.Tensor) -> None:
            self.inputs = inputs

    def convert(samples: Any, device: torch.device) -> Any:
        inputs, target = ls.data.collate(samples, device)
        return Graph(inputs), target

    def loss(model: Any, graph: Graph, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, graph.inputs, target)

    options = {"converter": convert, "loss_fn": loss, "copy_ahead": True}
    expected, _ = train(updater_of(batches_of("BatchIterator"), ONE_CPU, **options))
    with recorded() as found:
        assert train(updater_of(batches_of("BatchIterator"), **options))[0] == expected
    assert found == [False] * NUM_UPDATES


@on_emulated_devices
def test_a_step_function_takes_its_batches_in_its_own_order() -> None:
    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients()
        order.append(tuple(batch.indices))
        order.append(tuple(updater.next_batch().indices))

    order: list[Any] = []
    with recorded() as found:
        train(updater_of(batches_of("BatchIterator with workers"), step_fn=step), 3)
    iterator = batches_of("BatchIterator with workers")
    assert order == [tuple(next(iterator).indices) for _ in range(6)]
    iterator.finalize()
    assert found == []


# Bugs planted in the copies -----------------------------------------------------------------------------


@on_emulated_devices
@pytest.mark.parametrize("planted", [False, True])
def test_the_streams_that_compute_wait_for_the_copies(*, planted: bool) -> None:
    def hand_over(_: CopyStreams, device: torch.device, tensors: Any) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.accelerator.current_stream(device))

    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(CopyStreams, "hand_over", hand_over)
        _, record = train(updater_of(batches_of("BatchIterator with workers")))
    assert bool(record.races) is planted, record.races


@on_emulated_devices
@pytest.mark.parametrize("planted", [False, True])
def test_memory_of_a_copy_is_not_used_again_while_it_is_read(*, planted: bool) -> None:
    """A loss function keeps its inputs for one more forward, which still reads them when the next batch is copied."""
    kept: list[torch.Tensor] = []

    def loss(model: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        before = kept.pop().sum() if kept else torch.zeros((), device=inputs.device)
        kept.append(inputs)
        return cross_entropy(model, inputs, target) + 0.0 * before

    batches = ls.BatchIterator(Loaded(), 4, num_workers=1)
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        _, record = train(updater_of(batches, ("emulated:0",), loss_fn=loss, num_shards=1))
    assert bool(record.races) is planted, record.races


@on_emulated_devices
@pytest.mark.parametrize("planted", [False, True])
def test_data_on_the_device_is_read_after_it_was_written(*, planted: bool) -> None:
    inputs, target = (
        torch.stack([torch.as_tensor(each) for each in field]) for field in zip(*MLP.data(12), strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(CopyStreams, "start", lambda _: None)
        # Comparing the parameters waits for the devices, as audits do, which orders what streams do by itself.
        patch.setattr(engine, "refusing_writes", lambda _: nullcontext())
        pairs = TensorDataset(inputs.to("emulated:0"), target.to("emulated:0"))
        with (
            finalized(
                updater_of(ls.BatchIterator(pairs, 4), ("emulated:0",), copy_ahead=True, audit_every=0)
            ) as updater,
            observed() as record,
        ):
            # On the stream that computes, without a wait of the host.
            pairs.tensors[0].mul_(0.5)
            updater.update()
            updater.update()
    assert bool(record.races) is planted, record.races


@on_emulated_devices
@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_that_you_fill_again_after_an_update_needs_an_event(*, waits: bool) -> None:
    samples = MLP.data(4)
    inputs, target = (torch.stack([torch.as_tensor(each) for each in field]) for field in zip(*samples, strict=True))
    pinned = inputs.pin_memory(), target.pin_memory()
    options = {"on_overflow": "skip", "num_shards": 1}
    with finalized(updater_of([pinned], ("emulated:0",), **options)) as updater, observed() as record:
        for _ in range(3):
            updater.update()
            if waits:
                event = torch.Event("emulated:0")
                event.record(torch.accelerator.current_stream("emulated:0"))
                event.synchronize()
            pinned[0].mul_(0.5)
        torch.accelerator.synchronize("emulated:0")
    assert bool(record.races) is not waits, record.races
