"""Random numbers in an update belong to the shard, whatever draws them."""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.streams import StreamOverride, StreamOverrideError, override, shard_stream
from lockstep.streams.state import DEFAULT_GENERATOR
from tests.support.runs import (
    UNEVEN,
    Placement,
    cross_entropy,
    digests,
    finalized,
    state_digest,
    train,
    updater_for,
)
from tests.support.workloads import (
    ATTENTION,
    CHECKPOINTED,
    CONVNET,
    NOISY,
    RECURRENT,
    REENTRANT,
    TRANSFORMER,
    Workload,
)

NUM_UPDATES = 6
DRAWING = [CONVNET, TRANSFORMER, ATTENTION, RECURRENT, CHECKPOINTED, REENTRANT, NOISY]


@pytest.mark.parametrize("work", DRAWING, ids=repr)
def test_whatever_a_model_draws_by_the_placement_law_holds(work: Workload) -> None:
    found = digests(work, UNEVEN, num_shards=6, updates=NUM_UPDATES)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("work", DRAWING, ids=repr)
def test_the_seed_matters(work: Workload) -> None:
    assert train(work, num_shards=2, updates=1, seed=1) != train(work, num_shards=2, updates=1, seed=2)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_update_leaves_the_default_generator_alone(devices: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(NOISY, Placement(devices), num_shards=5, updates=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_generator_does_not_matter() -> None:
    found = set()
    for seed in range(2):
        torch.manual_seed(seed)
        found.add(train(NOISY, Placement(2), num_shards=5, updates=2))
    assert len(found) == 1


def test_shards_updates_and_tries_draw_their_own() -> None:
    drawn: dict[int, list[float]] = {}

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        drawn.setdefault(updater.iteration, []).append(torch.rand(()).item())
        return cross_entropy(model, x, target)

    with finalized(updater_for(CONVNET, num_shards=4, loss_fn=loss_fn, audit_every=0)) as updater:
        for _ in range(3):
            updater.update()
    numbers = [number for update in drawn.values() for number in update]
    assert len(numbers) == len(set(numbers)) == 12


def test_a_short_last_group_of_batches_draws_what_nobody_drew_before() -> None:
    drawn: list[float] = []

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        return cross_entropy(model, x, target)

    model = CONVNET.model()
    batches = ls.BatchIterator(CONVNET.data(25), 5, repeat=False)
    updater = ls.StandardUpdater(
        batches,
        torch.optim.SGD(model.parameters()),
        model,
        loss_fn=loss_fn,
        num_shards=2,
        accumulate=2,
        audit_every=0,
    )
    with finalized(updater):
        for _ in range(3):
            updater.update()
        with pytest.raises(StopIteration):
            updater.update()
    assert len(drawn) == len(set(drawn)) == 10


def in_a_thread_of_its_own(shape: torch.Size) -> torch.Tensor:
    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(shape)))
    thread.start()
    thread.join()
    return drawn[0]


def by_the_default_generators_state(shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(DEFAULT_GENERATOR.get_state())
    drawn = torch.rand(shape, generator=generator)
    DEFAULT_GENERATOR.set_state(generator.get_state())
    return drawn


PAST_THE_STREAM = {"thread": in_a_thread_of_its_own, "state": by_the_default_generators_state}


@pytest.mark.each_value
@pytest.mark.parametrize("way", PAST_THE_STREAM)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_what_draws_past_the_stream_is_noticed_and_made_good(way: str, devices: int) -> None:
    draw = PAST_THE_STREAM[way]
    past = False

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        noise = draw(x.shape) if past else torch.rand(x.shape)
        threads.add(threading.current_thread().name)
        return cross_entropy(model, x + noise, target)

    def run(placement: Placement) -> list[str]:
        nonlocal past
        found = []
        past = False
        with finalized(updater_for(CONVNET, placement, num_shards=5, loss_fn=loss_fn)) as updater:
            for update in range(4):
                past = update >= 2
                if update == 2 and placement.num_devices > 1:
                    before = torch.get_rng_state()
                    with pytest.warns(ls.RandomStreamWarning, match="drew from the default random generator"):
                        updater.update()
                    assert torch.equal(torch.get_rng_state(), before)
                else:
                    threads.clear()
                    updater.update()
                found.append(state_digest(updater))
        return found

    threads: set[str] = set()
    expected = run(Placement(1))
    assert run(Placement(devices)) == expected
    assert threads == {"MainThread"}


@pytest.mark.usefixtures("brief_turns")
def test_without_an_override_shards_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(NOISY, num_shards=5, updates=NUM_UPDATES)

    def refuse(_: StreamOverride) -> None:
        raise StreamOverrideError("Threads cannot have random streams here.")

    monkeypatch.setattr(StreamOverride, "install", refuse)
    with finalized(updater_for(NOISY, Placement(3), num_shards=5)) as updater:
        with pytest.warns(ls.RandomStreamWarning, match="Threads cannot have random streams here"):
            updater.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it says so once
            for _ in range(NUM_UPDATES - 1):
                updater.update()
        assert state_digest(updater) == expected


def test_a_failed_update_leaves_the_default_generator_alone() -> None:
    def loss_fn(*_: Any) -> torch.Tensor:
        in_a_thread_of_its_own(torch.Size([3]))
        raise RuntimeError("after drawing")

    before = torch.get_rng_state()
    with finalized(updater_for(CONVNET, Placement(2), num_shards=5, loss_fn=loss_fn)) as updater:
        with pytest.raises(ls.ReplicaError, match="after drawing"):
            updater.update()
        assert torch.equal(torch.get_rng_state(), before)


def test_an_owner_collected_while_another_installs_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, other = StreamOverride(), StreamOverride()
    forgotten.install()
    forgotten.remove()
    original = override._redirect

    def collecting(undo: ExitStack) -> None:
        forgotten.remove()  # what a finalizer does when the collector runs just here
        original(undo)
        forgotten.remove()

    monkeypatch.setattr(override, "_redirect", collecting)
    with other:
        assert other.installed
        with shard_stream(3):
            first = torch.rand(2)
        assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("second", "warned"),
    [("the same seed", True), ("another seed", False), ("no draws", False), ("weights of before", False)],
)
def test_an_updater_that_goes_on_with_the_same_random_numbers_is_warned_of(
    num_devices: int, second: str, warned: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0 if second == "no draws" else 0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, said = {name: each.clone() for name, each in model.state_dict().items()}, []
    for seed in (0, int(second == "another seed")):
        batches = [(torch.ones(4, 4), torch.arange(4) % 3)]
        updater = ls.ParallelUpdater(
            batches,
            optimizer,
            model,
            devices=["cpu"] * num_devices,
            num_shards=2,
            seed=seed,
            loss_fn=ls.supervised(nn.functional.cross_entropy),
        )
        with finalized(updater), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                updater.update()
        said.append([each for each in found if "Another updater with seed=0 has trained" in str(each.message)])
        if second == "weights of before":
            model.load_state_dict(before)
    assert [len(each) for each in said] == [0, int(warned)]
