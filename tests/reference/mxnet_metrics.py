"""MXNet's metrics, small: what counts samples counts samples, and what counts calls counts calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import lockstep as ls

Pair = tuple[float, float]


class Counted:
    """A metric that is a sum over a count; both are kept twice, since a local and since a whole reset.

    Args:
        name: As the original says it.
        measure: Gives for outputs and labels what is added to the sum and to the count.
        finish: Makes the value of the quotient.
    """

    def __init__(
        self,
        name: str,
        measure: Callable[[torch.Tensor, torch.Tensor], Pair],
        finish: Callable[[float], float] = float,
    ) -> None:
        self.name = name
        self.measure = measure
        self.finish = finish
        self.local: Pair = (0.0, 0)
        self.all: Pair = (0.0, 0)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        total, count = self.measure(output, target)
        self.local = self.local[0] + total, self.local[1] + count
        self.all = self.all[0] + total, self.all[1] + count

    def compute(self) -> float:
        return self._value(self.local)

    def reset_local(self) -> None:
        self.local = (0.0, 0)

    def record(self) -> dict[str, Any]:
        """Say what the trace says."""
        return {
            "name": self.name,
            "value": self._value(self.local),
            "global_value": self._value(self.all),
            "sum_metric": self.local[0],
            "num_inst": self.local[1],
        }

    def _value(self, pair: Pair) -> float:
        return self.finish(pair[0] / pair[1]) if pair[1] else math.nan


class Confusion(Counted):
    """A metric of how often each class was given for each label.

    Args:
        name: As the original says it.
        score: Gives the value of a table of counts, label by class.
        average: "macro" is the mean over calls of each call's own score, and counts calls; "micro" the score
            of all samples together, and counts samples; "pcc" the same, but counts calls.
        classes: How many there are.
    """

    def __init__(self, name: str, score: Callable[[torch.Tensor], float], average: str, classes: int) -> None:
        super().__init__(name, self._add)
        self.score = score
        self.average = average
        self.local_table = torch.zeros(classes, classes, dtype=torch.float64)
        self.table = torch.zeros(classes, classes, dtype=torch.float64)

    def reset_local(self) -> None:
        super().reset_local()
        self.local_table.zero_()

    def record(self) -> dict[str, Any]:
        found = super().record()
        if self.average == "macro":
            return found
        value = self.score(self.local_table)
        whole = self.score(self.table)
        return {**found, "value": value, "global_value": whole, "sum_metric": value * found["num_inst"]}

    def _add(self, output: torch.Tensor, target: torch.Tensor) -> Pair:
        counts = torch.zeros_like(self.table)
        for label, found in zip(target.long().tolist(), output.argmax(1).tolist(), strict=True):
            counts[label, found] += 1
        self.local_table += counts
        self.table += counts
        return (self.score(counts), 1) if self.average == "macro" else (0.0, _calls(self.average, target))


def _calls(average: str, target: torch.Tensor) -> int:
    return 1 if average == "pcc" else len(target)


class RunningCorrelation(Counted):
    """The original's correlation over calls: means move in the middle of a call, and nothing resets it."""

    def __init__(self) -> None:
        super().__init__("pearsonr", self._add)
        self.count = 0
        self.means = [0.0, 0.0]
        self.squares = [0.0, 0.0]
        self.products = 0.0

    def record(self) -> dict[str, Any]:
        value = self.products / math.sqrt(self.squares[0] * self.squares[1])
        return {**super().record(), "value": value}

    def _add(self, output: torch.Tensor, target: torch.Tensor) -> Pair:
        self.count += len(target)
        labels, found = target.double().flatten(), output.double().flatten()
        self._move(0, labels)
        self.products += float(((labels - self.means[0]) * (found - self.means[1])).sum())
        self._move(1, found)
        return 0.0, 1

    def _move(self, index: int, values: torch.Tensor) -> None:
        before = values - self.means[index]
        self.means[index] += float(before.sum()) / self.count
        self.squares[index] += float((before * (values - self.means[index])).sum())


def metric(name: str, options: dict[str, Any] | None, classes: int) -> Counted:
    """Make a metric as the trace names it."""
    options = options or {}
    average = options.get("average", "macro")
    k, eps, ignored = options.get("top_k", 1), options.get("eps", 1e-12), options.get("ignore_label")
    makers: dict[str, Callable[[], Counted]] = {
        "f1": lambda: Confusion("f1", _f1, average, 2),
        "mcc": lambda: Confusion("mcc", _mcc, average, 2),
        "pcc": lambda: Confusion("pcc", _pcc, "pcc", classes),
        "perplexity": lambda: Counted("perplexity", lambda *pair: _perplexity(*pair, ignored), math.exp),
        "acc": lambda: Counted("accuracy", lambda *pair: _right(*pair, 1)),
        "top_k_accuracy": lambda: Counted(f"top_k_accuracy_{k}", lambda *pair: _right(*pair, k)),
        "ce": lambda: Counted("cross-entropy", lambda *pair: _entropy(*pair, eps)),
        "nll_loss": lambda: Counted("nll-loss", lambda *pair: _entropy(*pair, eps)),
    }
    if (name, average) == ("pearsonr", "micro"):
        return RunningCorrelation()
    return makers[name]() if name in makers else Counted(name, MEASURES[name])


MEASURES: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]] = {
    "loss": lambda output, _: (float(output.sum()), output.numel()),
    "custom_sum": lambda output, target: (_apart(output, target), 1),
    "custom_tuple": lambda output, target: (_apart(output, target), len(target)),
    "mae": lambda output, target: (float((output - target).abs().mean()), 1),
    "mse": lambda output, target: (float((output - target).square().mean()), 1),
    "rmse": lambda output, target: (float((output - target).square().mean().sqrt()), 1),
    "pearsonr": lambda output, target: (
        float(torch.corrcoef(torch.stack([output.double().flatten(), target.double().flatten()]))[0, 1]),
        1,
    ),
}


def _right(output: torch.Tensor, target: torch.Tensor, k: int) -> Pair:
    accuracy = ls.metrics.Accuracy(top_k=k)
    accuracy.update(output, target.long())
    state = accuracy.state_dict()
    return float(str(state["correct"])), int(str(state["count"]))


def _chosen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.gather(1, target.long().unsqueeze(1)).squeeze(1)


def _entropy(output: torch.Tensor, target: torch.Tensor, eps: float) -> Pair:
    return float(-(_chosen(output, target) + eps).log().sum()), len(target)


def _perplexity(output: torch.Tensor, target: torch.Tensor, ignored: int | None) -> Pair:
    counted = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    return float(-_chosen(output, target)[counted].clamp(min=1e-10).log().sum()), int(counted.sum())


def _apart(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((target - output.argmax(1)).abs().sum())


def _f1(table: torch.Tensor) -> float:
    right, wrong, missed = table[1, 1].item(), table[0, 1].item(), table[1, 0].item()
    return 2 * right / (2 * right + wrong + missed) if right else 0.0


def _mcc(table: torch.Tensor) -> float:
    sums = [value for value in [*table.sum(0).tolist(), *table.sum(1).tolist()] if value]
    return float(table[1, 1] * table[0, 0] - table[0, 1] * table[1, 0]) / math.sqrt(math.prod(sums))


def _pcc(table: torch.Tensor) -> float:
    total, labels, found = table.sum(), table.sum(1), table.sum(0)
    products = (table.diagonal() * total - labels * found).sum()
    squares = (labels * (total - labels)).sum() * (found * (total - found)).sum()
    return float(products / squares.sqrt())
