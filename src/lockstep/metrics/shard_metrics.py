"""Metrics of an evaluation: what they must have, and how their states on several ranks are merged."""

from __future__ import annotations

import copy
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from lockstep import nest
from lockstep.metrics.accuracy import Accuracy
from lockstep.state import temporarily


@runtime_checkable
class Metric(Protocol):
    """A value over many batches. The metrics of torchmetrics have these three methods too."""

    def update(self, output: Any, target: Any, /) -> Any:
        """Add one batch.

        Args:
            output: The output of the model for the batch.
            target: The expected output.
        """

    def compute(self) -> Any:
        """Return the value over all batches since the last reset: a number or a 0-d tensor."""

    def reset(self) -> Any:
        """Discard all batches."""


@runtime_checkable
class Mergeable(Metric, Protocol):
    """A metric that several processes can compute together, each on a part of the batches."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the counts or sums so far, as numbers."""

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Any:
        """Set this metric to the value over all batches of several states.

        Args:
            states: What `state_dict` of metrics of this kind returned, including this one.
        """


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
        self.metric.reset()

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
            self.metric.reset()

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
        in_order = sorted((part for parts in by_rank for part in parts), key=lambda part: part[0])
        self._load([state for _, state in in_order])

    def compute(self) -> Any:
        """Return the value."""
        with ExitStack() as stack:
            # Their states are merged already, or they were given all shards.
            for each in _torchmetrics_in(self.metric):
                stack.enter_context(temporarily(each, distributed_available_fn=lambda: False))
            return self.metric.compute()

    def move(self, device: torch.device) -> None:  # noqa: B027 - optional; most metrics follow their input
        """Move the state to the device of the outputs.

        Args:
            device: The device.
        """

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
        # Only its author knows whether the state of another metric holds counts, so it is merged in order.
        rule: MergeRule = "order" if isinstance(metric, Mergeable) else "gather"
        super().__init__(metric, "count" if isinstance(metric, Accuracy) else rule)

    def _state(self) -> Mapping[str, Any]:
        # Deep, because a metric may go on adding to the very tensors that it has returned.
        return copy.deepcopy(dict(self.metric.state_dict()))

    def _load(self, states: Sequence[Any]) -> None:
        self.metric.merge(states)


MAX_ORDERED: Final = 1_000_000
"""The number of elements of floating-point sums above which the state of a metric is not kept for each shard."""

MAX_OBJECTS: Final = 10_000
"""The number of objects in which metrics of torchmetrics are looked for at most."""

_WRAPPERS: Final = frozenset({"ClasswiseWrapper", "MultioutputWrapper", "MultitaskWrapper"})
"""Wrappers that have no state besides that of the metrics they hold."""


def is_torchmetric(metric: object) -> bool:
    """Return whether an object is a metric or a collection of metrics of torchmetrics.

    Args:
        metric: The object.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def is_collection(metric: object) -> bool:
    """Return whether an object is a `MetricCollection` of torchmetrics.

    Args:
        metric: The object.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(metric, torchmetrics.MetricCollection)


def _torchmetrics_in(metric: object) -> list[Any]:
    """List the metrics of torchmetrics that a metric is, or holds in its attributes, lists and dicts."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    found, left, seen = list[Any](), [metric] if torchmetrics is not None else [], set[int]()
    for each in left:  # which grows
        if id(each) in seen or len(left) > MAX_OBJECTS:
            continue
        seen.add(id(each))
        if isinstance(each, torch.nn.Module):
            found += [module for module in each.modules() if isinstance(module, torchmetrics.Metric)]
        elif isinstance(each, Mapping | list | tuple):
            left += each.values() if isinstance(each, Mapping) else each
        else:
            left += getattr(each, "__dict__", {}).values()
    return found


class TorchMetric(ShardMetric):
    """A metric or a `MetricCollection` of torchmetrics, whose states are merged by their ``dist_reduce_fx``.

    Sums, minima, maxima and concatenations can be merged. A metric with a state of another kind, a wrapper with a
    state of its own, a metric with very large floating-point sums, or one of a class of your own that has attributes
    beside its states, is given the outputs of all shards instead.

    Args:
        metric: The metric or collection.
    """

    def __init__(self, metric: Any) -> None:
        self._holders: dict[str, Any] = {
            name: module for name, module in metric.named_modules() if hasattr(module, "_reductions")
        }
        super().__init__(metric, _rule_of(self._holders.values()))

    def move(self, device: torch.device) -> None:
        """Move the states to the device of the outputs."""
        self.metric.to(device)

    def _update(self, output: Any, target: Any) -> None:
        # A collection finds metrics with equal states by comparing them after its first update. States after a few
        # samples may be equal by chance, and on one rank only, so every metric is updated.
        if is_collection(self.metric) and not self.metric._groups_checked:  # noqa: SLF001
            for each in self.metric.values(copy_state=False):
                each.update(output, target)
        else:
            self.metric.update(output, target)

    def _state(self) -> dict[str, Any]:
        return {
            name: (
                holder._update_count,  # noqa: SLF001
                nest.map_tensors(_copied_to_cpu, {each: getattr(holder, each) for each in holder._defaults}),  # noqa: SLF001
            )
            for name, holder in self._holders.items()
        }

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        self.metric.reset()
        for name, holder in self._holders.items() if states else ():
            for state, reduction in holder._reductions.items():  # noqa: SLF001
                values = [each[name][1][state] for each in states]
                merged = _MERGES[_kind(reduction, holder._defaults[state])](values)  # noqa: SLF001
                setattr(holder, state, nest.map_tensors(partial(torch.Tensor.to, device=holder.device), merged))
            holder._update_count = sum(each[name][0] for each in states)  # noqa: SLF001
            holder._computed = None  # noqa: SLF001


def _rule_of(holders: Any) -> MergeRule:
    """Return how the states of metrics are merged."""
    num_summed, ordered = 0, False
    for holder in holders:
        names = {kind.__name__ for kind in type(holder).__mro__}
        if ("WrapperMetric" in names and not names & _WRAPPERS) or _has_other_attributes(holder):
            return "gather"
        for state, reduction in holder._reductions.items():  # noqa: SLF001
            default = holder._defaults[state]  # noqa: SLF001
            kind = _kind(reduction, default)
            if kind is None:
                return "gather"
            if kind == "dim_zero_sum" and default.is_floating_point():
                ordered = True
                num_summed += default.numel()
            ordered |= kind in {"dim_zero_cat", "list"}
    return "gather" if num_summed > MAX_ORDERED else "order" if ordered else "count"


def _has_other_attributes(holder: Any) -> bool:
    """Return whether a metric of another library has attributes beside its states, which may hold what it has seen."""
    torchmetrics: Any = sys.modules["torchmetrics"]
    if type(holder).__module__.partition(".")[0] == torchmetrics.__name__:
        return False
    return bool(vars(holder).keys() - vars(torchmetrics.SumMetric()).keys() - holder._defaults.keys())  # noqa: SLF001


def _kind(reduction: Any, default: Any) -> str | None:
    """Return the kind of a reduction, or None if states cannot be merged one after another."""
    name = _name(reduction)
    if isinstance(default, list):
        return "list" if reduction is None or name == "dim_zero_cat" else None
    return name if name in _MERGES else None


def _name(function: Any) -> str:
    """Return the name of a reduction of torchmetrics; empty for any other function."""
    module = getattr(function, "__module__", None) or ""
    return getattr(function, "__name__", "") if module.startswith("torchmetrics.") else ""


def _concatenated(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the entries of several lists; a list that `compute` has replaced by a tensor counts as one entry."""
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _copied_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


_MERGES: Final[Mapping[str | None, Callable[[Sequence[Any]], Any]]] = {
    # One after another, in the order and with the rounding of an accumulating loop.
    "dim_zero_sum": partial(reduce, operator.add),
    "dim_zero_max": lambda values: torch.stack(list(values)).amax(0),
    "dim_zero_min": lambda values: torch.stack(list(values)).amin(0),
    "dim_zero_cat": lambda values: torch.cat(list(values)),
    "list": _concatenated,
}
