"""Metrics of torchmetrics in an evaluator give what a plain loop with them gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.extensions import Evaluator
from lockstep.metrics import OwnMetric, TorchMetric, flatten_value
from tests.support.programs.evaluating import NUM_CLASSES, Decaying, SquaredError, data, torch_metrics

torchmetrics = pytest.importorskip("torchmetrics")


def batches() -> list[Sequence[torch.Tensor]]:
    x, y = data().tensors
    return list(zip(x.split(6), y.split(6), strict=True))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, NUM_CLASSES)


def outcomes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what metrics are updated with."""
    network = model()
    for x, y in batches():
        with torch.no_grad():
            output = network(x)
        yield output, y


def by_hand(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the values of metrics in a plain loop."""
    for output, target in outcomes():
        for metric in metrics.values():
            metric.update(output, target)
    return {name: metric.compute() for name, metric in metrics.items()}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    return torch.equal(found, expected)


def test_torchmetrics_give_the_bits_of_a_plain_loop() -> None:
    evaluator = Evaluator(batches(), torch_metrics(), model=model())
    found = evaluator.evaluate()
    expected = by_hand(torch_metrics())
    assert [name for name in expected if not equal(evaluator.results[name], expected[name])] == []
    assert found["set/recall"] == expected["set"]["recall"]
    assert found["f1/class2"] == expected["f1"][2].item()
    assert found["confusion/class0/class1"] == expected["confusion"][0, 1].item()
    assert found["by_name/multiclassaccuracy_0"] == expected["by_name"]["multiclassaccuracy_0"]


def test_a_collection_may_be_passed_as_it_is() -> None:
    metrics = torch_metrics()["set"]
    found = Evaluator(batches(), metrics, model=model()).evaluate()
    assert set(found) == {"accuracy", "recall", "precision"}


def test_a_metric_is_evaluated_anew_each_time() -> None:
    evaluator = Evaluator(batches(), torch_metrics(), model=model())
    assert evaluator.evaluate() == evaluator.evaluate()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("set", "count"),
        ("f1", "count"),
        ("confusion", "count"),
        ("by_name", "count"),
        ("auroc", "order"),
        ("calibration", "order"),
        ("hinge", "order"),
        ("smallest", "gather"),
    ],
)
def test_the_rule_of_a_metric_follows_from_its_states(name: str, rule: str) -> None:
    assert TorchMetric(torch_metrics()[name]).rule == rule


def test_the_rule_of_other_metrics() -> None:
    assert OwnMetric(SquaredError()).rule == "order"
    assert OwnMetric(Decaying()).rule == "gather"
    assert TorchMetric(torchmetrics.PearsonCorrCoef()).rule == "gather"
    assert TorchMetric(torchmetrics.MaxMetric()).rule == "count"


def test_a_metric_of_your_own_with_other_attributes_than_states_is_given_all_outputs() -> None:
    class Counts(torchmetrics.Metric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, output: torch.Tensor, _: torch.Tensor) -> None:
            self.total += len(output)

        def compute(self) -> torch.Tensor:
            return self.total

    class Median(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[torch.Tensor] = []

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output, target)
            self.values.append(output)

        def compute(self) -> torch.Tensor:
            return torch.cat(self.values).median()

    assert TorchMetric(Counts()).rule == "count"
    assert TorchMetric(Median()).rule == "gather"


def test_states_of_ranks_are_merged_in_order_of_shards() -> None:
    metrics = [TorchMetric(torchmetrics.MeanSquaredError()), TorchMetric(torchmetrics.MeanSquaredError())]
    pairs = [(torch.rand(5), torch.rand(5)) for _ in range(6)]
    alone = torchmetrics.MeanSquaredError()
    for index, pair in enumerate(pairs):
        alone.update(*pair)
        metrics[index % 2].add((index, 0), *pair)
    parts = [metric.parts() for metric in metrics]
    for metric in metrics:
        metric.merge(parts)
        assert torch.equal(metric.compute(), alone.compute())


def test_a_value_that_is_no_number_is_left_out_with_a_warning() -> None:
    class Text:
        def update(self, _output: Any, _target: Any) -> None:
            """Ignore the batch: the value is always the same."""

        def reset(self) -> None:
            """Return at once, because nothing is counted."""

        def compute(self) -> Any:
            return {"best": 1.0, "summary": "good"}

    evaluator = Evaluator(batches(), {"text": Text()}, model=model())
    with pytest.warns(UserWarning, match="'text' is not observed, because it holds a str"):
        assert evaluator.evaluate() == {}
    assert evaluator.results["text"]["best"] == 1.0
    with pytest.raises(ValueError, match="more than 1000"):
        flatten_value("matrix", torch.zeros(40, 40))


def test_a_metric_of_ignite_is_refused() -> None:
    class Accuracy:
        __module__ = "ignite.metrics.accuracy"

        def update(self, output: Any) -> None: ...

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None: ...

    class Own(Accuracy):
        """A subclass of one's own."""

    for metric in (Accuracy(), Own()):
        with pytest.raises(TypeError, match=f"PyTorch-Ignite, got {type(metric).__name__} as 'a'. Pass one"):
            Evaluator(batches(), {"a": metric}, model=model())


def test_a_metric_may_return_the_state_that_it_adds_to() -> None:
    class Total:
        def __init__(self) -> None:
            self.sums = {"total": torch.zeros(()), "counts": [0]}

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.sums["total"] += output.sum()
            self.sums["counts"][0] += len(target)

        def reset(self) -> None:
            self.sums["total"].zero_()
            self.sums["counts"][0] = 0

        def state_dict(self) -> dict[str, Any]:
            return self.sums

        def merge(self, states: Sequence[Any]) -> None:
            self.reset()
            for state in states:
                self.sums["total"] += state["total"]
                self.sums["counts"][0] += state["counts"][0]

        def compute(self) -> torch.Tensor:
            return self.sums["total"] / self.sums["counts"][0]

    evaluator = Evaluator(batches(), {"mean": Total()}, model=model())
    evaluator.evaluate()
    assert torch.equal(evaluator.results["mean"], by_hand({"mean": Total()})["mean"])


def test_metrics_of_torchmetrics_that_a_metric_holds_do_not_communicate() -> None:
    class Holding:
        def __init__(self) -> None:
            self.held: dict[str, Any] = {"all": [torchmetrics.MeanMetric()], "itself": self}
            self.other = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric()})
            self.asked: list[bool] = []

        def metrics(self) -> list[Any]:
            return [*self.held["all"], self.other["sum"]]

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            for each in self.metrics():
                each.update(output.mean() + target.sum())

        def reset(self) -> None:
            for each in self.metrics():
                each.reset()

        def compute(self) -> float:
            self.asked = [each.distributed_available_fn() for each in self.metrics()]
            return sum(float(each.compute()) for each in self.metrics())

    holding = Holding()
    for each in holding.metrics():
        each.distributed_available_fn = lambda: True
    Evaluator(batches(), {"held": holding}, model=model()).evaluate()
    assert holding.asked == [False, False]
    assert all(each.distributed_available_fn() for each in holding.metrics())
