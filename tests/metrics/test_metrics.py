"""Means, averages and accuracy, to the bit."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.errors import StateError
from lockstep.metrics import Accuracy, Average, Mean, Metric, as_mean, merge, read
from lockstep.metrics.average import MAX_HELD
from lockstep.updaters import Loss
from lockstep.updaters.loss import metric_pairs

# Multiples of 1/8 of moderate size: their products and sums are exact, so the expected mean is too.
EIGHTHS = st.integers(-8000, 8000).map(lambda eighths: eighths / 8)


@given(st.lists(st.tuples(EIGHTHS, st.integers(1, 100)), min_size=1, max_size=30), st.booleans())
def test_an_average_is_the_sum_over_the_summed_weight(pairs: list[tuple[float, int]], as_tensors: bool) -> None:
    average = Average()
    for value, weight in pairs:
        average.update(torch.tensor(value) if as_tensors else value, weight)
    exact = sum(Fraction(value) * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert average.compute() == float(exact)


def test_an_average_holds_a_bounded_number_of_values_and_loses_none() -> None:
    average = Average()
    for _ in range(3 * MAX_HELD + 5):
        average.update(torch.tensor(0.1, dtype=torch.float64))
        assert len(average.state_dict()["held_totals"]) < MAX_HELD
    assert average.compute() == pytest.approx(0.1, rel=1e-15)


def test_a_sum_of_many_small_values_is_rounded_once() -> None:
    average, running = Average(), 0.0
    for _ in range(1000):
        average.update(0.1)
        running += 0.1
    assert average.compute() == 0.1
    assert running / 1000 != 0.1  # what adding up one by one would give


def test_a_save_and_load_anywhere_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2 * MAX_HELD + 100, generator=generator)
    whole = Average()
    for value in values:
        whole.update(value, 3)
    for cut in (1, MAX_HELD - 1, MAX_HELD, MAX_HELD + 7, 2 * MAX_HELD + 99):
        first, second = Average(), Average()
        for value in values[:cut]:
            first.update(value, 3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for value in values[cut:]:
            second.update(value, 3)
        assert second.compute() == whole.compute()


def test_an_average_of_means_counts_samples_and_of_nothing_is_nan() -> None:
    average = Average()
    assert average.empty
    assert math.isnan(average.compute())
    average.update(Mean(30.0, 30))
    average.update(Mean(10.0, 2))
    assert average.compute() == 40 / 32
    average.reset()
    assert average.empty


def test_a_value_of_weight_0_counts_for_nothing() -> None:
    average = Average()
    average.update(Mean(torch.tensor(math.nan), 0))
    average.update(2.0, 3)
    assert average.compute() == 2.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show(odd: float) -> None:
    average = Average()
    for value in (1.0, odd):
        average.update(value)
    assert str(average.compute()) == str(odd)


def test_an_average_keeps_no_graph() -> None:
    average = Average()
    leaf = torch.tensor(1.0, requires_grad=True)
    average.update(leaf * 2)
    assert not average._held[0].total.requires_grad


@pytest.mark.parametrize("value", [torch.zeros(2), "1", None, [1.0]])
def test_as_mean_refuses_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match="An observed"):
        as_mean(value)


def test_a_mean_brings_its_own_weight() -> None:
    with pytest.raises(TypeError, match="`weight` must be omitted for a Mean"):
        Average().update(Mean(1.0, 1), 2)


def test_read_keeps_the_order_over_types() -> None:
    values = [
        1,
        torch.tensor(2.5),
        torch.tensor(3),
        4.5,
        torch.tensor(5.25, dtype=torch.float64),
        torch.tensor(True),
    ]
    assert read(values) == [1.0, 2.5, 3.0, 4.5, 5.25, 1.0]
    assert read([]) == []


# Accuracy


def slow_accuracy(output: torch.Tensor, target: torch.Tensor, k: int, ignore: int | None) -> float:
    """Count by sorting the classes of each sample, equal scores by index."""
    right = counted = 0
    scores = output.movedim(1, -1).reshape(-1, output.shape[1]).tolist()
    for row, label in zip(scores, target.flatten().tolist(), strict=True):
        if label == ignore:
            continue
        best = sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]
        right, counted = right + (label in best), counted + 1
    return right / counted if counted else math.nan


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("ignore", [None, 2, -100])
@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4), (2, 5, 3, 2)])
def test_accuracy_counts_like_sorting(shape: tuple[int, ...], ignore: int | None, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    accuracy = Accuracy(k, ignore_index=ignore)
    # Scores of few different values, so that many are equal.
    output = torch.randint(0, 3, shape, generator=generator).float()
    target = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=generator)
    if ignore == -100:
        target[0] = ignore
    half = shape[0] // 2
    for part in (slice(0, half), slice(half, None)):
        accuracy.update(output[part], target[part])
    assert accuracy.compute() == slow_accuracy(output, target, k, ignore)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_accuracy_is_argmax_for_one_class(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(50, 4, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    accuracy = Accuracy()
    accuracy.update(output, target.to(dtype))
    assert accuracy.compute() == float((output.argmax(1) == target).double().mean())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_nan_score_is_never_right(k: int) -> None:
    accuracy = Accuracy(k)
    accuracy.update(torch.tensor([[math.nan, 0.0, 1.0]]), torch.tensor([0]))
    assert accuracy.compute() == 0
    accuracy.reset()
    accuracy.update(torch.tensor([[math.nan, 0.0, 1.0]]), torch.tensor([2]))  # behind the NaN
    assert accuracy.compute() == float(k >= 2)


def test_accuracy_of_nothing_is_nan() -> None:
    accuracy = Accuracy(ignore_index=0)
    accuracy.update(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert math.isnan(accuracy.compute())


def test_accuracy_goes_on_from_its_state() -> None:
    first, second = Accuracy(), Accuracy()
    first.update(torch.eye(3), torch.tensor([0, 1, 1]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(torch.eye(3)[:1], torch.tensor([0]))
    assert second.state_dict() == {"correct": 3, "count": 4}


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(2)),
        (torch.zeros(3, 2, 4), torch.zeros(3)),
    ],
)
def test_accuracy_refuses_shapes_that_do_not_fit(output: torch.Tensor, target: torch.Tensor) -> None:
    accuracy = Accuracy()
    with pytest.raises(ValueError, match=r"must have the shapes \(N, C, ...\) and \(N, ...\) with at least 2 classes"):
        accuracy.update(output, target)
    assert accuracy.state_dict() == {"correct": 0, "count": 0}


def test_accuracy_refuses_less_than_one_class() -> None:
    with pytest.raises(ValueError, match="`top_k` must be at least 1, got 0"):
        Accuracy(0)


@pytest.mark.parametrize("metric", [Average(), Accuracy()])
def test_metrics_are_metrics_and_refuse_states_that_do_not_fit(metric: Average | Accuracy) -> None:
    assert isinstance(metric, Metric)
    before = metric.state_dict()
    with pytest.raises(StateError, match="unknown: 'surplus'"):
        metric.load_state_dict({**before, "surplus": 0})
    with pytest.raises(StateError, match="missing: "):
        metric.load_state_dict({})
    assert metric.state_dict() == before


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 4), (7, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_accuracy_of_binary_and_multilabel_targets(
    shape: tuple[int, ...], dtype: torch.dtype, threshold: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(shape, generator=generator)
    targets = torch.rand(shape, generator=generator) > 0.5
    accuracy = Accuracy(threshold=threshold)
    accuracy.update(scores[:3], targets[:3].to(dtype))
    accuracy.update(scores[3:], targets[3:].to(dtype))
    assert accuracy.compute() == ((scores >= threshold) == targets).double().mean().item()


def test_binary_scores_in_a_column_and_ignored_targets() -> None:
    accuracy = Accuracy(threshold=0.0, ignore_index=-1)
    accuracy.update(torch.tensor([[0.0], [-1.0], [2.0], [torch.nan]]), torch.tensor([1, 1, -1, 0]))
    assert accuracy.state_dict() == {"correct": 1, "count": 3}


@pytest.mark.parametrize("shapes", [((4,), (4,)), ((4, 1), (4,)), ((4, 3), (4, 3)), ((4, 1), (4, 1))])
def test_scores_without_classes_are_refused_with_the_cure(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    output, target = torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64)
    with pytest.raises(ValueError, match=r"at least 2 classes, got .* Pass `threshold=0.0` \(logits\)"):
        Accuracy().update(output, target)


def test_targets_that_are_no_classes_are_refused_with_the_cure() -> None:
    accuracy = Accuracy()
    with pytest.raises(TypeError, match=r"`target` must be integer classes, got torch\.float32\. .* target=1\)"):
        accuracy.update(torch.eye(3), torch.tensor([0.9, 0.1, 0.5]))
    for wrong in (-100, 3):
        with pytest.raises(ValueError, match=rf"`target` must be in 0\.\.2, got {wrong}\. Pass .*ignore_index="):
            accuracy.update(torch.eye(3), torch.tensor([0, wrong, 2]))
    binary = Accuracy(threshold=0.0)
    for target in (torch.tensor([1, -100]), torch.tensor([1.0, 0.4])):
        with pytest.raises(ValueError, match=r"`target` must be 0 or 1 with a threshold, got .* Pass .*ignore_index="):
            binary.update(torch.zeros(2), target)
    assert accuracy.state_dict() == binary.state_dict() == {"correct": 0, "count": 0}


def test_a_threshold_must_fit() -> None:
    with pytest.raises(ValueError, match=r"and `top_k` must be 1 then, got 0\.5 and 2"):
        Accuracy(2, threshold=0.5)
    with pytest.raises(ValueError, match="`threshold` must be a number"):
        Accuracy(threshold=math.nan)
    with pytest.raises(ValueError, match=r"must have one shape with a threshold, got \(4, 2\) and \(4,\)"):
        Accuracy(threshold=0.5).update(torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize(
    "value", [np.array(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5, dtype="float32")], ids=repr
)
def test_numbers_of_numpy_are_observed(value: Any) -> None:
    assert as_mean(value) == Mean(0.5, 1)
    assert type(as_mean(value).total) is float
    average = Average()
    average.update(value, weight=3)
    assert average.compute() == 0.5


@pytest.mark.parametrize("value", [np.array([0.5]), np.array([[0.5]]), np.zeros(2), [0.5], "0.5"], ids=repr)
def test_arrays_with_dimensions_are_not(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a Mean, a number or a 0-d tensor"):
        as_mean(value)


def test_pairs_of_numpy_are_summed_in_double_precision() -> None:
    (pair,) = metric_pairs(Loss(torch.ones(()), metrics={"a": (np.float32(2**24), np.array(1, dtype="int8"))})).values()
    assert pair == (2.0**24, 1.0)
    assert [type(each) for each in pair] == [float, float]


def test_means_over_unequal_parts_merge_into_the_mean_of_all_values() -> None:
    values = [1.0, 2.0, 6.0, 7.0, 12.0]
    parts = [values[:1], values[1:1], values[1:]]
    merged = merge(Mean(sum(part), len(part)) for part in parts)
    assert merged == Mean(sum(values), len(values))
    assert float(merged) == 5.6
    assert math.isnan(float(merge([])))
