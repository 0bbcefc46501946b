"""Merge the states of metrics of PyTorch-Ignite, which is not imported unless a metric of it is used."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

from lockstep.metrics.shard_metrics import MergeRule, ShardMetric, merge_sums, to_cpu

_SUMS: Final[Mapping[str, tuple[MergeRule, tuple[str, ...]]]] = {
    "Accuracy": ("count", ("_num_correct", "_num_examples")),
    "TopKCategoricalAccuracy": ("count", ("_num_correct", "_num_examples")),
    "ConfusionMatrix": ("count", ("confusion_matrix", "_num_examples")),
    "Loss": ("order", ("_sum", "_num_examples")),
    "MeanSquaredError": ("order", ("_sum_of_squared_errors", "_num_examples")),
    "RootMeanSquaredError": ("order", ("_sum_of_squared_errors", "_num_examples")),
    "MeanAbsoluteError": ("order", ("_sum_of_absolute_errors", "_num_examples")),
}
"""The metrics whose states are sums, with the attributes that hold them."""

_MODULE: Final = "ignite.metrics"


def is_ignite(metric: object) -> bool:
    """Return whether an object is a metric of ignite.

    Args:
        metric: The object.
    """
    metrics = sys.modules.get(_MODULE)
    return metrics is not None and isinstance(metric, metrics.Metric)


class IgniteMetric(ShardMetric):
    """A metric of ignite, which is updated with the pair ``(output, target)`` after its ``output_transform``.

    The common metrics are merged over ranks. Any other one is given the outputs of all shards.

    Args:
        metric: The metric.

    Raises:
        TypeError: If it is a `RunningAverage`, which needs an engine.
    """

    def __init__(self, metric: Any) -> None:
        metrics = sys.modules[_MODULE]
        if isinstance(metric, metrics.RunningAverage):
            raise TypeError(
                "`metrics` must not hold a RunningAverage, which averages over the iterations of an ignite Engine and "
                "not over a pass of the data. Pass the metric itself, such as Accuracy()."
            )
        kind = type(metric)
        # An exact type: a subclass may have added a state.
        known = _SUMS.get(kind.__name__) if kind is getattr(metrics, kind.__name__, None) else None
        # A MetricsLambda updates the metrics it is computed from, which may be evaluated on their own too.
        own = copy.deepcopy(metric) if isinstance(metric, metrics.MetricsLambda) else metric
        super().__init__(own, "gather" if known is None else known[0])
        # As with an engine, each metric is updated once, although several parts of an expression may refer to it.
        self._leaves = list({id(leaf): leaf for leaf in _leaves(own, metrics.MetricsLambda)}.values())
        self._names = () if known is None else known[1]

    def _reset(self) -> None:
        with self._alone():
            self.metric.reset()

    def _update(self, output: Any, target: Any) -> None:
        # The method that an engine calls after each iteration, which applies `output_transform`.
        engine = SimpleNamespace(state=SimpleNamespace(output=(output, target)))
        with self._alone():
            for leaf in self._leaves:
                leaf.iteration_completed(engine)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Show ignite a single process, so that it does not sum over the default process group once more."""
        utils: Any = importlib.import_module("ignite.distributed.utils")
        serial = importlib.import_module("ignite.distributed.comp_models").base._SerialModel  # noqa: SLF001
        before = utils._model, utils._need_to_sync  # noqa: SLF001
        utils._model, utils._need_to_sync = serial(), False  # noqa: SLF001
        try:
            yield
        finally:
            utils._model, utils._need_to_sync = before  # noqa: SLF001

    def _state(self) -> dict[str, Any]:
        return {name: to_cpu(getattr(self.metric, name)) for name in self._names}

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._reset()
        for name in self._names if states else ():
            merged = merge_sums([each[name] for each in states])
            device = self.metric._device  # noqa: SLF001
            setattr(self.metric, name, merged.to(device) if isinstance(merged, torch.Tensor) else merged)


def _leaves(metric: Any, composed: type) -> Iterator[Any]:
    """Yield the metrics that a metric is computed from; by default the metric itself."""
    if not isinstance(metric, composed):
        yield metric
        return
    for part in (*metric.args, *metric.kwargs.values()):  # type: ignore[attr-defined]  # a MetricsLambda
        if hasattr(part, "iteration_completed"):
            yield from _leaves(part, composed)
