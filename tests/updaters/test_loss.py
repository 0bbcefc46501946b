"""Loss functions that cannot be trained by are refused, each by its own error, and nothing moves."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss, mse_loss

import lockstep as ls
from lockstep.updaters.loss import warn_of_rows
from tests.support.small_updater import mean_of_output, updater_of

X = torch.arange(8.0).reshape(4, 2)


def complex_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_of_output(model, x).to(torch.complex64)


def lone_metric(model: nn.Module, x: torch.Tensor) -> ls.Loss:
    return ls.Loss(mean_of_output(model, x), metrics={"a": 1.0})  # type: ignore[dict-item]


def three_metrics(model: nn.Module, x: torch.Tensor) -> ls.Loss:
    return ls.Loss(mean_of_output(model, x), metrics={"a": torch.ones(3)})


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_metric_may_be_a_tensor_of_two_elements(num_devices: int, dtype: torch.dtype) -> None:
    def counted(model: nn.Module, x: torch.Tensor, *, stacked: bool) -> ls.Loss:
        pair = torch.tensor([3, len(x)], dtype=dtype)
        return ls.Loss(mean_of_output(model, x), metrics={"a": pair if stacked else tuple(pair)})

    found = []
    for stacked in (False, True):
        loss_fn = partial(counted, stacked=stacked)
        with updater_of(nn.Linear(2, 1), X, devices=num_devices, loss_fn=loss_fn) as updater:
            found.append(updater.update().metrics["a"])
    assert found[0] == found[1]
    assert float(found[1]) == 3 * num_devices / len(X)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("total", "weight"),
    [
        (torch.tensor(40_000.0, dtype=torch.float16), 1),
        (torch.tensor(2.0**127, dtype=torch.bfloat16), torch.tensor(40_000.0, dtype=torch.float16)),
        (torch.tensor(200, dtype=torch.uint8), torch.tensor(100, dtype=torch.int8)),
    ],
)
def test_metrics_of_any_dtype_are_summed_over_shards(num_devices: int, total: torch.Tensor, weight: Any) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss(mean_of_output(model, x), metrics={"a": (total, weight)})

    expected = ls.metrics.Mean(4 * float(total), 4 * float(weight))
    with updater_of(nn.Linear(2, 1), X, devices=num_devices, loss_fn=loss_fn, num_shards=4) as updater:
        found = updater.update().metrics["a"]
    assert (float(found.total), float(found.weight)) == (expected.total, expected.weight)
    evaluated = ls.extensions.Evaluator([X], loss_fn=loss_fn, model=nn.Linear(2, 1), num_shards=4).evaluate()
    assert evaluated["a"] == float(expected)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("loss_fn", "kind", "rule"),
    [
        (complex_loss, TypeError, "`loss_fn` must return a real loss, got torch.complex64"),
        (
            three_metrics,
            TypeError,
            r"`metrics\['a'\]` of a Loss must be a pair \(sum, weight\), such as \(correct, count\), got tensor",
        ),
        (
            lone_metric,
            TypeError,
            r"`metrics\['a'\]` of a Loss must be a pair \(sum, weight\), such as \(correct, count\), got 1.0",
        ),
    ],
)
def test_what_is_no_loss_is_refused(num_devices: int, loss_fn: Any, kind: type[Exception], rule: str) -> None:
    model = nn.Linear(2, 1)
    before = ls.digest(model)
    with updater_of(model, X, devices=num_devices, loss_fn=loss_fn) as updater:
        with pytest.raises(kind, match=rule):
            updater.update()
        assert (updater.iteration, ls.digest(model)) == (0, before)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_of_another_model_than_the_one_given_is_refused(num_devices: int) -> None:
    model = nn.Linear(2, 1)
    before = ls.digest(model)
    with updater_of(model, X, devices=num_devices, loss_fn=lambda _, x: model(x).mean()) as updater:
        with pytest.raises(ValueError, match="must compute its loss with the model that it is given"):
            updater.update()
        assert (updater.iteration, ls.digest(model)) == (0, before)


@pytest.mark.parametrize("weight", [np.int64(3), np.float32(3), np.array(3)])
def test_a_weight_may_be_a_number_of_numpy(weight: Any) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss(mean_of_output(model, x), weight=weight)

    with updater_of(nn.Linear(2, 1), X, loss_fn=loss_fn, num_shards=4) as updater:
        assert updater.update().weight == 12


def test_a_batch_of_weight_zero_is_not_mistaken_for_it() -> None:
    def nothing_counts(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss(mean_of_output(model, x), weight=0)

    with updater_of(nn.Linear(2, 1), X, loss_fn=nothing_counts) as updater:
        assert not updater.update().applied


def test_a_dict_batch_needs_the_name_of_its_label() -> None:
    model = nn.Linear(2, 1)
    updater = ls.ParallelUpdater(
        [{"x": X, "y": X[:, :1]}],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    with pytest.raises(ls.ReplicaError, match=r"`target` must name the label .* one of \['x', 'y'\]"):
        updater.update()


def test_a_saved_state_stays_what_it_was() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with updater_of(model, X, optimizer=optimizer) as updater:
        updater.update()
        before = ls.digest(model, optimizer)
        state = updater.state_dict()
        updater.update()
        assert ls.digest(model, optimizer) != before
        updater.load_state_dict(state)
        assert (updater.iteration, ls.digest(model, optimizer)) == (1, before)


def test_a_target_that_is_not_in_the_batch_is_named() -> None:
    loss_fn = ls.supervised(nn.functional.mse_loss, target="label")
    with pytest.raises(ValueError, match=r"`target` must name a key of the batch \(x, y\), got 'label'"):
        loss_fn(nn.Identity(), x=X, y=X)
    with pytest.raises(ValueError, match=r"`target` must be None for batches that are not dicts, got 'label'"):
        loss_fn(nn.Identity(), X, X)


class Squeezing(nn.MSELoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input.squeeze(1), target)


COLUMN, ROW = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    "criterion", [mse_loss, nn.MSELoss(), nn.L1Loss(reduction="sum"), partial(huber_loss, delta=2.0)]
)
@pytest.mark.parametrize(("output", "target"), [(COLUMN, ROW), (ROW, COLUMN)])
def test_all_pairs_of_samples_are_not_compared(criterion: Any, output: torch.Tensor, target: torch.Tensor) -> None:
    shapes = rf"{tuple(output.shape)} and {tuple(target.shape)}"
    with pytest.raises(ValueError, match=re.escape(shapes) + r".* each sample with all others\. Give them one shape"):
        ls.supervised(criterion)(nn.Identity(), output, target)


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (mse_loss, COLUMN, COLUMN),
        (nn.BCEWithLogitsLoss(), ROW, ROW),
        (nn.BCEWithLogitsLoss(), COLUMN, COLUMN),
        (cross_entropy, COLUMN, torch.zeros(2, dtype=torch.long)),
        (lambda output, target: mse_loss(output.squeeze(1), target), COLUMN, ROW),
        (Squeezing(), COLUMN, ROW),
    ],
)
def test_criteria_for_which_the_shapes_are_right_get_them(criterion: Any, output: Any, target: Any) -> None:
    assert ls.supervised(criterion)(nn.Identity(), output, target) == criterion(output, target)


@pytest.mark.parametrize("shape", [(4,), (8,), (3, 4), (4, 2)])
def test_a_target_with_rows_for_all_samples_is_right(shape: tuple[int, ...]) -> None:
    warn_of_rows(ls.supervised(cross_entropy), [X, torch.zeros(shape)], {}, num_samples=4)
    warn_of_rows(ls.supervised(cross_entropy, target="y"), [], {"y": torch.zeros(shape)}, num_samples=4)
    warn_of_rows(ls.supervised(cross_entropy), [X, ["a", "b"]], {}, num_samples=4)


def test_a_criterion_must_be_callable() -> None:
    with pytest.raises(TypeError, match="`criterion` must be callable, got a str"):
        ls.supervised("mse")
