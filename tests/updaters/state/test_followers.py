"""Modules that a user gives as replicas show the weights of the last update."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls

PLACES = {"main": "cpu", "second": "cpu"}
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network(*, lazy: bool = False) -> nn.Module:
    first = nn.LazyLinear(5) if lazy else nn.Linear(4, 5)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Linear(5, 3))


def updater_over(models: dict[str, nn.Module]) -> ls.ParallelUpdater:
    return ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(X, Y), 6),
        torch.optim.SGD(models["main"].parameters(), lr=0.1),
        models=models,
        devices=PLACES,
        loss_fn=ls.supervised(functional.cross_entropy),
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_given_replicas_hold_what_the_main_one_holds(lazy: bool) -> None:
    main = network(lazy=lazy)
    second = copy.deepcopy(main)
    updater = updater_over({"second": second, "main": main})
    try:
        seen = set()
        for _ in range(3):
            updater.update()
            assert ls.digest(second) == ls.digest(main)
            seen.add(ls.digest(second))
        assert len(seen) == 3
        updater.compute_gradients((X, Y))
        updater.apply_gradients()
        assert ls.digest(second) == ls.digest(main) not in seen
    finally:
        updater.finalize()


def test_given_replicas_hold_a_loaded_state() -> None:
    trained = updater_over({"main": network(), "second": network()})
    main, second = network(), network()
    fresh = updater_over({"main": main, "second": second})
    try:
        trained.update()
        fresh.load_state_dict(trained.state_dict())
        assert ls.digest(second) == ls.digest(main) == ls.digest(trained.get_all_models()["main"])
    finally:
        trained.finalize()
        fresh.finalize()


def test_a_mapping_of_one_model_named_main_is_that_model() -> None:
    torch.manual_seed(0)
    bare = network()
    named = copy.deepcopy(bare)
    batches = [(X, Y)]
    loss_fn = ls.supervised(functional.cross_entropy)
    one = ls.ParallelUpdater(
        batches, torch.optim.SGD(bare.parameters(), lr=0.1), bare, devices=["cpu"], loss_fn=loss_fn
    )
    other = ls.ParallelUpdater(
        {"main": batches},
        {"main": torch.optim.SGD(named.parameters(), lr=0.1)},
        {"main": named},
        devices=["cpu"],
        loss_fn=loss_fn,
    )
    try:
        before = ls.digest(bare)
        one.update()
        other.update()
        assert ls.digest(named) == ls.digest(bare) != before
    finally:
        one.finalize()
        other.finalize()
