"""What an update reports: means over all shards, whoever ran them."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import launch_on_ranks
from tests.support.small_updater import updater_of

X = torch.arange(1.0, 8.0).reshape(7, 1)


def weighted(model: nn.Module, x: torch.Tensor) -> ls.Loss:
    """Samples above 5 weigh nothing, the others what they are."""
    weights = torch.where(x <= 5, x, 0.0)
    value = (model(x) * 0.0 + x).mul(weights).sum() / weights.sum()
    return ls.Loss(value, weight=weights.sum(), metrics={"large": (x.max(), 1), "n": (len(x), 1)})


def result_of(devices: int, loss_scale: float | None = None) -> ls.UpdateResult:
    with updater_of(
        nn.Linear(1, 1),
        X,
        devices=devices,
        batch_size=7,
        num_shards=7,
        loss_fn=weighted,
        loss_scale=loss_scale,
    ) as updater:
        return updater.update()


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_numbers_are_weighted_means_that_do_not_depend_on_devices(devices: int, loss_scale: float | None) -> None:
    result = result_of(devices, loss_scale)
    assert result.applied
    assert result.tries == 1
    assert result.nonfinite is None
    assert result.loss_scale == (loss_scale or 1.0)
    # Shards of one sample each; 6 and 7 weigh nothing and took no part.
    assert result.weight == 1 + 2 + 3 + 4 + 5
    assert result.num_samples == 7
    assert result.loss.dtype == torch.float64
    assert result.loss.shape == ()
    assert result.loss.item() == (1 + 4 + 9 + 16 + 25) / 15
    assert [report.shard for report in result.reports] == [0, 1, 2, 3, 4]
    assert float(result.metrics["large"]) == (1 + 2 + 3 + 4 + 5) / 5
    assert float(result.metrics["n"]) == 1.0
    assert float(result.observation()["loss"]) == result.loss.item()
    assert set(result.observation()) == {"loss", "skipped", "large", "n"}


def samples_of_result(devices: int) -> int:
    return result_of(devices).num_samples


def test_samples_are_those_of_all_ranks() -> None:
    assert launch_on_ranks(samples_of_result, 2, 1) == [7, 7]


def test_numbers_hold_no_graph() -> None:
    result = result_of(2)
    assert not any(report.loss.requires_grad for report in result.reports)
    assert not result.loss.requires_grad


def test_the_loss_is_the_one_before_the_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    with updater_of(model, X, devices=2, batch_size=7, num_shards=2) as updater:
        assert updater.update().loss.item() == 2.0 * X.mean().item()
        assert updater.update().loss.item() == (2.0 - 0.125 * 4.0) * X.mean().item()


def test_sums_are_the_same_on_every_version_of_python() -> None:
    """`sum` compensates for rounding from Python 3.12 on, so that 10 times 0.1 is 1 there."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss((model.weight * 0 + x).mean(), weight=0.1)

    model = nn.Linear(1, 1, bias=False)
    with updater_of(model, torch.ones(10, 1), batch_size=10, num_shards=10, loss_fn=loss_fn) as updater:
        result = updater.update()
    assert result.weight == 0.9999999999999999
    assert result.loss_and_metrics()["loss"].total == 0.9999999999999999


@pytest.mark.parametrize("scale", [1.0, math.inf])
def test_a_result_shows_what_it_says(scale: float) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss((model.weight * x).mean() * scale, metrics={"largest": (x.max(), 1)})

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    with updater_of(model, X[:2], batch_size=2, num_shards=1, loss_fn=loss_fn) as updater:
        result = updater.update()
    assert repr(result) == (
        "UpdateResult(applied=True, tries=1, loss=1.5, weight=2, loss_scale=1, metrics={'largest': 2.0}, "
        "nonfinite=None)"
        if scale == 1.0
        else "UpdateResult(applied=False, tries=1, loss=inf, weight=2, loss_scale=1, "
        "metrics={'largest': 2.0}, nonfinite='weight')"
    )


@pytest.mark.parametrize("options", [{}, {"on_overflow": "skip", "loss_scale": ls.DynamicLossScale()}])
def test_a_result_can_be_sent_to_another_process(options: dict[str, Any]) -> None:
    """As `launch` does with what a rank returns; what is still on the device is read for it."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with updater_of(
        model, X, devices=2, batch_size=7, num_shards=7, loss_fn=weighted, optimizer=optimizer, **options
    ) as updater:
        result = updater.update()
    assert repr(pickle.loads(pickle.dumps(result))) == repr(result)  # noqa: S301 - made the line before


def test_a_metric_is_what_it_was_before_the_step() -> None:
    weight = nn.Parameter(torch.ones(()))
    model = nn.Module()
    model.weight = weight

    def loss_fn(model: Any, x: torch.Tensor) -> ls.Loss:
        return ls.Loss((model.weight * x).mean(), metrics={"weight": (model.weight, 1)})

    updater = ls.ParallelUpdater(
        [torch.ones(4)],
        torch.optim.SGD([weight], lr=0.5),
        model,
        devices=["cpu"],
        num_shards=1,
        loss_fn=loss_fn,
    )
    result = updater.update()
    assert float(result.metrics["weight"]) == 1.0
    assert weight.item() == 0.5
    updater.finalize()
