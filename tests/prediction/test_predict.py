"""Predictions: every sample once and in order, what the model receives of a batch, and equal bits on any placement."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep import nest
from tests.support.programs.predicting import Nested, data, differing, predict
from tests.support.ranks import launch_on_ranks


def same(one: Any, other: Any) -> bool:
    """Compare two results bit for bit."""
    pairs = zip(nest.tensors(one), nest.tensors(other), strict=True)
    return all(torch.equal(left, right) and left.dtype == right.dtype for left, right in pairs) and one[-1] == other[-1]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return predict(1)


def test_outputs_are_those_of_the_model_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    before = ls.digest(model)
    state = torch.get_rng_state()
    found = ls.predict(model, data(), devices=["cpu"] * 2, batch_size=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert ls.digest(model) == before
    with torch.no_grad():
        whole = torch.cat([model.eval()(part) for part in data().tensors[0].split(7)])
    assert torch.equal(found, whole)
    assert not found.requires_grad


def test_devices_are_only_places(alone: list[Any]) -> None:
    assert same(predict(2), alone)
    assert same(predict(3), alone)


@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (2, 2)])
def test_ranks_are_only_places(alone: list[Any], ranks: int, devices: int) -> None:
    for found in launch_on_ranks(predict, ranks, devices):
        assert same(found, alone)


def test_strided_shards_come_back_in_order() -> None:
    shards, strided = predict(2, 3), predict(3, 3, "strided")
    assert torch.equal(shards[0]["logits"], strided[0]["logits"])
    # With noise per shard the numbers differ between splits, but not which sample they belong to.
    far = (shards[3]["logits"] - strided[3]["logits"]).abs().max()
    assert 0 < far < 1


def test_structure_and_means() -> None:
    found = ls.predict(Nested(), data(), devices=1, batch_size=10)
    assert list(found) == ["logits", "pair", "mean"]
    assert isinstance(found["pair"], tuple)
    assert found["pair"][0].dtype == torch.int64
    assert torch.equal(found["pair"][0], found["logits"].argmax(1))
    torch.testing.assert_close(found["mean"], found["logits"].mean())


class Noisy(nn.Module):
    """Draws from a generator of its own, or from the default one."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("own", [True, False])
def test_a_model_that_draws_from_a_generator_of_its_own_is_named(own: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ls.predict(Noisy(own=own), data(), devices=2, batch_size=10)
    assert len(said) == own
    assert all(
        "The model or a function draws from a `torch.Generator` of your own." in str(each.message) for each in said
    )


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask


class Named(nn.Module):
    def forward(self, *, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return x if labels is None else -x


def test_a_target_that_the_model_cannot_take_is_left_out() -> None:
    x, y = torch.arange(4.0), torch.tensor([0.0, 1.0, 0.0, 1.0])
    pairs = TensorDataset(x, y)
    assert torch.equal(ls.predict(nn.Identity(), pairs, devices=1), x)
    assert torch.equal(ls.predict(nn.Identity(), TensorDataset(x), devices=1), x)
    assert torch.equal(ls.predict(nn.Identity(), list(x), devices=1), x)
    assert torch.equal(ls.predict(nn.Identity(), DataLoader(pairs, 3), devices=1), x)
    with pytest.raises(ValueError, match="`target` must be given if the model may take the last entry"):
        ls.predict(Masked(), pairs, devices=1, converter=ls.collate)
    assert torch.equal(ls.predict(Masked(), pairs, devices=1, target=True), x)
    assert torch.equal(ls.predict(Masked(), pairs, devices=1, target=False), x * y)


def test_keys_that_the_model_does_not_name_are_left_out() -> None:
    rows = [{"x": torch.tensor(float(i)), "labels": torch.tensor(i), "text": torch.tensor(0)} for i in range(5)]
    x = torch.arange(5.0)
    assert torch.equal(ls.predict(Named(), rows, devices=1), -x)
    rows = [{key: row[key] for key in ("x", "labels")} for row in rows]
    assert torch.equal(ls.predict(Named(), rows, devices=1, target="labels"), x)
    assert torch.equal(ls.predict(Named(), rows, devices=1, target=False), -x)
    with pytest.raises(KeyError, match=r"`target` must be one of \['labels', 'x'\]"):
        ls.predict(Named(), rows, devices=1, target="y")


def test_precision_is_that_of_the_model_or_the_given_one() -> None:
    model, samples = nn.Linear(4, 2), TensorDataset(torch.randn(5, 4))
    assert ls.predict(model, samples, devices=1).dtype == torch.float32
    assert ls.predict(model, samples, devices=1, precision="bf16").dtype == torch.bfloat16
    assert ls.predict(model.to(torch.bfloat16), samples, devices=1).dtype == torch.bfloat16


@dataclass
class Strange:
    logits: torch.Tensor
    cache: object


class Caching(nn.Module):
    def forward(self, x: torch.Tensor) -> Strange:
        return Strange(x, object())


class Growing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), len(x))


def test_errors_say_what_to_do() -> None:
    samples = TensorDataset(torch.randn(5, 4))
    with pytest.raises(TypeError, match=r"got a object.* Pass output=lambda out"):
        ls.predict(Caching(), samples, devices=1)
    assert ls.predict(Caching(), samples, devices=1, output=lambda out: out.logits).shape == (5, 4)
    with pytest.raises(TypeError, match=r"`output` must return dense tensors, .*sparse_coo\. .*out\.to_dense"):
        ls.predict(nn.Identity(), samples, devices=1, output=torch.Tensor.to_sparse)
    with pytest.raises(ValueError, match="`output` must have the same shape for all samples, got"):
        ls.predict(Growing(), samples, devices=1, batch_size=3)
    with pytest.raises(TypeError, match="TensorDataset"):
        ls.predict(Caching(), samples.tensors, devices=1)
    with pytest.raises(ValueError, match="`dataset` must yield at least one batch"):
        ls.predict(Caching(), iter([]), devices=1)
    with pytest.raises(ValueError, match="must end after one pass"):
        ls.predict(Caching(), ls.BatchIterator(samples, 2), devices=1)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        ls.predict(Caching(), samples, devices=1, batch_size=0)


def test_a_view_does_not_keep_the_memory_of_its_base() -> None:
    found = ls.predict(nn.Identity(), TensorDataset(torch.randn(3, 100)), devices=1, output=lambda out: out[:, -1])
    assert found.shape == (3,)
    assert found.untyped_storage().nbytes() == 12


def test_time_first_outputs() -> None:
    x = torch.randn(6, 5)
    found = ls.predict(nn.Identity(), TensorDataset(x), devices=2, batch_size=2, output=torch.t, output_dim=1)
    assert torch.equal(found, x.t())


def test_an_extension_may_predict(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data(), 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=2,
        num_shards=2,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )
    trainer = ls.Trainer(updater, until=(2, "iteration"), out=tmp_path)
    found = []
    trainer.extend(lambda trainer: found.append(trainer.predict(data())), trigger=(1, "iteration"), name="predict")
    trainer.run()
    assert len(found) == 2
    assert not torch.equal(found[0], found[1])
    with torch.no_grad():
        assert torch.equal(found[1], model(data().tensors[0]))
    with pytest.raises(KeyError, match="must be one of"):
        trainer.predict(data(), model_name="other")


def test_ranks_that_differ_are_told() -> None:
    for messages in launch_on_ranks(differing, 2, None):
        assert messages[0].startswith("DisagreementError: Rank 1 holds other bits in 'bias'")
        assert messages[1].startswith("DisagreementError: The ")
        assert len(messages) == 2
