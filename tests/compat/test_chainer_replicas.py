"""`compat.chainer.ParallelUpdater` with `models` and `devices` by the same names: replicas of one model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.compat import chainer

PLACES = {"main": "cpu", "second": "cpu"}
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network(*, lazy: bool = False) -> nn.Module:
    first = nn.LazyLinear(5) if lazy else nn.Linear(4, 5)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Linear(5, 3))


def updater_over(models: dict[str, nn.Module]) -> chainer.ParallelUpdater:
    return chainer.ParallelUpdater(
        ls.BatchIterator(TensorDataset(X, Y), 6),
        torch.optim.SGD(models["main"].parameters(), lr=0.1),
        models=models,
        devices=PLACES,
        loss_func=ls.supervised(functional.cross_entropy),
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


def test_a_replica_holds_the_main_one_where_a_step_function_has_applied_gradients() -> None:
    main = network()
    second = copy.deepcopy(main)

    class Stepping(chainer.ParallelUpdater):
        def update_core(self, batch: object) -> None:
            before.append(ls.digest(second))
            self.compute_gradients(batch)
            self.apply_gradients()
            before.append(ls.digest(second))

    before: list[str] = []
    updater = Stepping(
        ls.BatchIterator(TensorDataset(X, Y), 6),
        torch.optim.SGD(main.parameters(), lr=0.1),
        models={"main": main, "second": second},
        devices=PLACES,
        loss_func=ls.supervised(functional.cross_entropy),
    )
    try:
        updater.update()
        assert before[0] == before[1] != ls.digest(second) == ls.digest(main)
    finally:
        updater.finalize()


def refused(error: type[Exception], message: str, **changed: object) -> None:
    main = network()
    options = {"models": {"main": main, "second": copy.deepcopy(main)}, "devices": PLACES} | changed
    with pytest.raises(error, match=message):
        chainer.ParallelUpdater([(X, Y)], torch.optim.SGD(main.parameters(), lr=0.1), **options)  # type: ignore[arg-type]


def test_modules_that_are_no_replicas_are_refused() -> None:
    others = {"main": network(), "second": nn.Linear(4, 3)}
    refused(
        ValueError, "`models` must be replicas of one model, got 'second' that differs from 'main' in ", models=others
    )
    refused(TypeError, r"`models\['second'\]` must be a torch.nn.Module", models={"main": network(), "second": len})


def test_the_optimizer_of_another_replica_is_refused() -> None:
    refused(ValueError, "`optimizer` must hold parameters of `model` only", models={name: network() for name in PLACES})


def test_names_of_models_are_those_of_devices() -> None:
    refused(ValueError, "`models` must have the names of `devices`", devices={"main": "cpu", "third": "cpu"})
    refused(KeyError, "main", devices={"second": "cpu"})
    refused(ValueError, "`devices` must be given", devices=None)


def test_the_main_device_comes_first_whatever_its_place_in_the_dict() -> None:
    main = network()
    updater = chainer.ParallelUpdater(
        [(X, Y)],
        torch.optim.SGD(main.parameters(), lr=0.1),
        models={"second": copy.deepcopy(main), "main": main, "third": copy.deepcopy(main)},
        devices={"second": "cpu", "main": "cpu", "third": "cpu"},
        loss_func=ls.supervised(functional.cross_entropy),
    )
    try:
        updater.update()
        assert list(updater.get_all_models().values()) == [main]
    finally:
        updater.finalize()
