"""Draws from generators outside of the streams are warned of, once and by name."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.runs import Placement, cross_entropy, finalized, updater_for
from tests.support.workloads import MLP

DRAWS: dict[str, Callable[[], Any]] = {"Python's `random`": random.random, "`numpy.random`": np.random.random}


class Drawing:
    """A loss that draws in some updates, in the shards of one device."""

    def __init__(self, draw: Callable[[], Any], when: Callable[[int], bool] = lambda _: True) -> None:
        self.draw, self.when, self.update = draw, when, 0

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        factor = self.draw() if self.when(self.update) else 1.0
        return cross_entropy(model, x, target) * factor


def warned(updater: ls.ParallelUpdater, loss: Drawing, num_updates: int) -> list[tuple[int, str]]:
    """List after how many updates a warning came, with its text."""
    found = []
    for _ in range(num_updates):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.update = updater.iteration
            updater.update()
        found += [(loss.update, str(each.message)) for each in caught if each.category is ls.DeterminismWarning]
    return found


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("name", DRAWS)
def test_it_is_warned_of_once_with_the_cure(name: str, num_devices: int) -> None:
    loss = Drawing(DRAWS[name])
    with finalized(updater_for(MLP, Placement(num_devices), num_shards=4, loss_fn=loss)) as updater:
        ((update, message),) = warned(updater, loss, 4)
    assert update == 0
    assert f"this changed, which is no part of the model: {name}." in message
    assert "random.Random(torch.randint(2**31, ()).item())" in message


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("name", DRAWS)
def test_a_decision_that_falls_alike_is_warned_of_too(name: str, num_devices: int) -> None:
    loss = Drawing(lambda: float(DRAWS[name]() < 2))
    updater = updater_for(MLP, Placement(num_devices), num_shards=4, loss_fn=loss)
    with finalized(updater), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            updater.update()
    (found,) = (each for each in caught if issubclass(each.category, ls.DeterminismWarning | ls.RandomStreamWarning))
    assert f"draws from {name}." in str(found.message)


class Noisy(nn.Linear):
    """Adds noise from a generator in one of its attributes."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.noise))


NOISE = torch.Generator()


def with_global_noise(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x + torch.randn(x.shape, generator=NOISE), target)


def with_noise(model: nn.Module, x: torch.Tensor, target: torch.Tensor, *, noise: torch.Generator) -> torch.Tensor:
    return cross_entropy(model, x + torch.randn(x.shape, generator=noise), target)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("where", ["closure", "globals", "partial", "method", "model"])
def test_a_generator_that_belongs_to_no_shard_is_warned_of(where: str, num_devices: int) -> None:
    noise = torch.Generator()

    class Losses:
        def __init__(self) -> None:
            self.noise = noise

        def loss(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return with_noise(model, x, target, noise=self.noise)

    loss_fn: Any = {
        "closure": lambda model, x, target: with_noise(model, x, target, noise=noise),
        "globals": with_global_noise,
        "partial": functools.partial(with_noise, noise=noise),
        "method": Losses().loss,
        "model": cross_entropy,
    }[where]
    model = Noisy() if where == "model" else nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ls.BatchIterator(MLP.data(), 9)
    updater = ls.ParallelUpdater(
        batches, optimizer, model, devices=["cpu"] * num_devices, num_shards=4, loss_fn=loss_fn
    )
    with finalized(updater):
        with pytest.warns(ls.DeterminismWarning, match=r"part of the model: a `torch\.Generator` of your own\."):
            updater.update()
        updater.update()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_seed_that_is_set_in_each_call_is_warned_of_where_threads_share_it(num_devices: int) -> None:
    def seeded() -> float:
        np.random.seed(0)
        return 1.0 + float(np.random.random())

    state = np.random.get_state(legacy=False)["state"]["pos"]
    loss = Drawing(seeded)
    updater = updater_for(MLP, Placement(num_devices), num_shards=4, loss_fn=loss)
    with finalized(updater), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updater.update()
    found = [str(each.message) for each in caught if each.category is ls.RandomStreamWarning]
    assert ["`numpy.random`" in each for each in found] == [True] * (num_devices - 1)
    np.random.seed(state % 1000)


def test_the_generators_are_as_before_where_nothing_draws() -> None:
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    with finalized(updater_for(MLP, Placement(2), num_shards=4, loss_fn=cross_entropy)) as updater:
        updater.update()
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


def test_a_loss_function_may_refer_to_a_variable_without_a_value() -> None:
    model = nn.Linear(6, 3)

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, target) if model.training else later

    batches, optimizer = ls.BatchIterator(MLP.data(), 9), torch.optim.SGD(model.parameters(), lr=0.1)
    with finalized(ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"], loss_fn=loss_fn)) as updater:
        assert updater.update().applied
    later = torch.zeros(())


@pytest.mark.parametrize(("update", "count"), [(0, 1), (1, 0)])
def test_the_first_update_is_watched_and_the_first_after_loading(update: int, count: int) -> None:
    loss = Drawing(random.random, lambda now: now == update)
    with finalized(updater_for(MLP, num_shards=4, loss_fn=loss)) as updater:
        assert len(warned(updater, loss, 5)) == count
        state = updater.state_dict()
        loss.when = lambda now: now == 5
        updater.load_state_dict(state)
        assert len(warned(updater, loss, 4)) == 1 - count


@pytest.mark.filterwarnings("error::lockstep.DeterminismWarning")
def test_neither_torch_nor_a_generator_of_ones_own_nor_a_dataset_is_meant() -> None:
    own = Drawing(lambda: random.Random(torch.randint(2**31, ()).item()).random())  # noqa: S311 - what the warning advises

    class Draws:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((6,), random.random() + np.random.random()), index % 3  # noqa: S311 - no secrets

    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for streams in (True, False):
        batches = ls.BatchIterator(Draws(), 6, sample_streams=streams)
        updater = ls.ParallelUpdater(
            batches, optimizer, model, devices=["cpu"] * 2, num_shards=4, seed=int(streams), loss_fn=own
        )
        with finalized(updater):
            for _ in range(3):
                updater.update()


def test_an_error_in_its_place_leaves_everything_as_it_was() -> None:
    loss = Drawing(random.random)
    with finalized(updater_for(MLP, num_shards=4, loss_fn=loss)) as updater:
        before = ls.digest(updater.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ls.DeterminismWarning):
                updater.update()
        assert ls.digest(updater.state_dict()) == before
        assert updater.update().applied
