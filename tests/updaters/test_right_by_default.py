"""What an updater and a trainer do where a user has said nothing: training mode, the end of the data, warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.compat import chainer
from lockstep.extensions import LogReport

DATA = TensorDataset(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2)
MODE = "The model was in evaluation mode"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@contextmanager
def updater_of(model: Any, iterator: Any = None, **options: Any) -> Iterator[ls.ParallelUpdater]:
    parameters = [each for net in (model.values() if isinstance(model, dict) else [model]) for each in net.parameters()]
    updater = ls.ParallelUpdater(
        ls.BatchIterator(DATA, 5) if iterator is None else iterator,
        torch.optim.SGD(parameters, lr=0.1),
        model,
        **{"devices": ["cpu"], "num_shards": 1, "loss_fn": ls.supervised(nn.functional.cross_entropy)} | options,
    )
    try:
        yield updater
    finally:
        updater.finalize()


def test_a_model_in_evaluation_mode_is_switched_and_that_is_said_once() -> None:
    digests = []
    for given in (network().eval(), network()):
        torch.manual_seed(3)
        for module in given.modules():
            if isinstance(module, nn.Linear | nn.BatchNorm1d):
                module.reset_parameters()
        with updater_of(given) as updater, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            updater.update()
            given.eval()  # as a user's own test() does
            updater.update()
            updater.compute_gradients(next(ls.BatchIterator(DATA, 5)))
        assert all(module.training for module in given.modules())
        assert len([each for each in caught if MODE in str(each.message)]) == 1
        digests.append(ls.digest(given))
    assert digests[0] == digests[1]


def test_modules_that_are_frozen_on_purpose_stay_so() -> None:
    model = network()
    model[1].eval()
    with updater_of(model) as updater:
        updater.update()
    assert not model[1].training
    assert model.training


def test_a_network_in_evaluation_mode_beside_one_that_trains_stays_so() -> None:
    nets = {"student": network(), "teacher": network().eval()}

    def loss_fn(models: dict[str, nn.Module], x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(models["student"](x), models["teacher"](x))

    with updater_of(nets, loss_fn=loss_fn) as updater:
        updater.update()
    assert not any(module.training for module in nets["teacher"].modules())


@pytest.mark.parametrize("end", ["one epoch", "a generator"])
def test_data_that_end_before_the_run_are_named(end: str, tmp_path: Path) -> None:
    once = ls.BatchIterator(DATA, 5, repeat=False) if end == "one epoch" else (batch for batch in DataLoader(DATA, 5))
    with updater_of(network(), once) as updater:
        trainer = ls.Trainer(updater, (3, "epoch"), tmp_path)
        message = r"ended after 1 epochs and 2 updates, before `until` \(\(3, 'epoch'\)\) was reached. Give an iterator"
        with pytest.raises(ls.EndOfDataError, match=message) as caught:
            trainer.run()
    assert isinstance(caught.value.__cause__, StopIteration)


def test_an_epoch_has_the_batches_of_a_data_loader(tmp_path: Path) -> None:
    with updater_of(network(), ls.BatchIterator(DATA, 4)) as updater:
        ls.Trainer(updater, (3, "epoch"), tmp_path).run()
        assert updater.iteration == 3 * len(DataLoader(DATA, 4))


def test_chainers_iterator_fills_the_last_batch_up_and_shuffles() -> None:
    batches = chainer.SerialIterator(range(5), 2, shuffle=False)
    assert [list(next(batches)) for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert chainer.SerialIterator(range(5), 2).shuffle
    once = chainer.SerialIterator(range(5), 2, False, False)
    assert [list(batch) for batch in once] == [[0, 1], [2, 3], [4]]
    with chainer.SerialIterator(range(5), 2) as first, chainer.SerialIterator(range(5), 2) as second:
        first.next()
        state: dict[str, Any] = {}
        first.serialize(state.setdefault)
        second.serialize(state.setdefault)
        assert list(first.next()) == list(second.next())


def test_bits_that_depend_on_the_number_of_devices_are_warned_of() -> None:
    message = r"`num_shards` is not given, so each batch is cut into one shard per device \(2\)"
    with pytest.warns(UserWarning, match=message), updater_of(network(), devices=["cpu", "cpu"], num_shards=None):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with updater_of(network(), num_shards=None), updater_of(network(), devices=["cpu", "cpu"], num_shards=2):
            pass


def test_the_last_rate_of_an_interval_is_logged(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updater = ls.StandardUpdater(
        ls.BatchIterator(DATA, 5),
        optimizer,
        model,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count),
    )
    trainer = ls.Trainer(updater, (4, "iteration"), tmp_path)

    def rate(trainer: ls.Trainer) -> None:
        trainer.observe("lr", optimizer.param_groups[0]["lr"])
        trainer.observe("body/lr", 2 * optimizer.param_groups[0]["lr"])
        trainer.observe("other", optimizer.param_groups[0]["lr"])

    trainer.extend(rate, trigger=(1, "iteration"), priority=1000)
    log = LogReport(trigger=(4, "iteration"))
    trainer.extend(log)
    trainer.run()
    assert (log.log[0]["lr"], log.log[0]["body/lr"]) == (0.5**4, 2 * 0.5**4)
    assert log.log[0]["other"] == sum(0.5**count for count in range(1, 5)) / 4


def test_until_is_named_where_it_is_wrong_and_may_be_set_to_a_pair(tmp_path: Path) -> None:
    with updater_of(network()) as updater:
        with pytest.raises(TypeError, match=r"`until` must be a Trigger, a pair such as .* got 10"):
            ls.Trainer(updater, 10, tmp_path)  # type: ignore[arg-type]
        trainer = ls.Trainer(updater, (1, "iteration"), tmp_path)
        trainer.run()
        trainer.until = (2, "iteration")
        trainer.run()
        assert updater.iteration == 2
