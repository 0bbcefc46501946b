"""Update a metric with the shards of an evaluation, and merge what the ranks have counted.

A metric of any kind follows one of three rules, each of which gives the same bits wherever the shards are computed:

* ``"count"``: the state consists of counts, minima and maxima. Each rank updates the metric with its own shards, and
  the states of the ranks are merged at the end, which is exact.
* ``"order"``: the state holds sums of floating-point numbers or lists of values. The state of each shard is kept, and
  all of them are merged in the order of the shards, as if one process had updated the metric with one after another.
* ``"gather"``: it is not known how to merge two states. The outputs and targets of all shards are sent to every rank,
  which updates the metric with them in order.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch

from lockstep.metrics.accuracy import Accuracy
from lockstep.metrics.metric import Mergeable, Metric

MergeRule: TypeAlias = Literal["count", "order", "gather"]
ShardKey: TypeAlias = "tuple[int, int]"
"""The number of a batch, and that of a shard in it."""
Part: TypeAlias = "tuple[ShardKey, Any]"
"""The first shard of a state, and the state, whose tensors are on the CPU."""


class ShardMetric(ABC):
    """A metric that is updated with the shards of an evaluation in order.

    Args:
        metric: The metric.
        rule: How states are merged; see this module.
    """

    def __init__(self, metric: Any, rule: MergeRule) -> None:
        self.metric = metric
        self.rule: MergeRule = rule
        self._parts: list[Part] = []

    def reset(self) -> None:
        """Discard all shards."""
        self._parts = []
        self._reset()

    def add(self, key: ShardKey, output: Any, target: Any) -> None:
        """Update the metric with one shard.

        Args:
            key: The number of the batch and of the shard.
            output: The output of the model.
            target: The expected output.
        """
        self._update(output, target)
        if self.rule == "order":
            self._parts.append((key, self._state()))
            self._reset()

    def parts(self) -> list[Part]:
        """Return the states to merge: one per shard, one for all shards of this rank, or none."""
        return [((0, 0), self._state())] if self.rule == "count" else self._parts

    def merge(self, by_rank: Sequence[Sequence[Part]]) -> None:
        """Set the metric to the value over all shards.

        Args:
            by_rank: What `parts` returned on each rank.
        """
        if self.rule == "gather" or (self.rule == "count" and len(by_rank) == 1):
            return
        # Sorting is stable, so the states of ranks that have no number of their own stay in the order of ranks.
        in_order = sorted((part for parts in by_rank for part in parts), key=_key_of)
        self._load([state for _, state in in_order])

    def compute(self) -> Any:
        """Return the value."""
        with self._alone():
            return self.metric.compute()

    def move(self, device: torch.device) -> None:  # noqa: B027 - optional; most metrics follow their input
        """Move the state to the device of the outputs.

        Args:
            device: The device.
        """

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevent the metric from communicating with other processes itself."""
        yield

    def _reset(self) -> None:
        """Reset the metric."""
        self.metric.reset()

    def _update(self, output: Any, target: Any) -> None:
        """Update the metric."""
        self.metric.update(output, target)

    @abstractmethod
    def _state(self) -> Any:
        """Return a copy of the state."""

    @abstractmethod
    def _load(self, states: Sequence[Any]) -> None:
        """Set the state to the merged states, given in order of shards."""


class OwnMetric(ShardMetric):
    """A metric with the methods of `Mergeable`; one without them is given the outputs of all shards.

    Args:
        metric: The metric.
    """

    def __init__(self, metric: Metric) -> None:
        if isinstance(metric, Accuracy):
            super().__init__(metric, "count")
        else:
            # Only its author knows whether the state holds counts, so it is merged in order.
            super().__init__(metric, "order" if isinstance(metric, Mergeable) else "gather")

    def _state(self) -> Mapping[str, Any]:
        # Deep, because a metric may go on adding to the very tensors that it has returned.
        return copy.deepcopy(dict(self.metric.state_dict()))

    def _load(self, states: Sequence[Any]) -> None:
        self.metric.merge(states)


def merge_sums(values: Sequence[Any]) -> Any:
    """Add numbers or tensors one after another, in the order and with the rounding of an accumulating loop.

    Args:
        values: The terms, at least one.

    >>> merge_sums([1, 2.5])
    3.5
    """
    return reduce(lambda total, value: total + value, values)


def to_cpu(value: Any) -> Any:
    """Copy a state to the CPU: a tensor, a list of tensors, or a number.

    Args:
        value: The state.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return [to_cpu(each) for each in value] if isinstance(value, list) else value


def _key_of(part: Part) -> ShardKey:
    return part[0]
