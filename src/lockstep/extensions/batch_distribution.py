"""Distribute the batches of an evaluation over the ranks, and merge the results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lockstep.communicators import Communicator, LocalCommunicator
from lockstep.metrics import Mean, Mergeable, Metric, read_means

SKIPPED: Final = object()
"""A placeholder for a batch that another rank evaluates."""


class BatchDistribution:
    """Distributes batches round robin: of W ranks, rank b modulo W evaluates batch b.

    Args:
        communicator: The communicator that connects the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def wanted(self, ahead: int, size: int) -> list[range]:
        """Return the samples of a batch that this rank reads, all or none; see `data.Iterator.read_only`."""
        return [range(size)] if ahead % self._communicator.size == self._communicator.rank else []

    def select(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, with `SKIPPED` instead of those of other ranks."""
        for number, batch in enumerate(batches):
            yield batch if number % self._communicator.size == self._communicator.rank else SKIPPED

    def gather(self, measured: list[dict[str, Mean]]) -> list[dict[str, Mean]]:
        """Return the means of all batches in their order, given those of this rank's batches."""
        if self._communicator.size == 1:
            return measured
        by_rank = self._exchange([read_means(means) for means in measured])
        count = sum(map(len, by_rank))
        size = len(by_rank)
        # In the order of the batches, so that the sums over them have the bits of an evaluation by one process.
        return [{name: Mean(*pair) for name, pair in by_rank[b % size][b // size].items()} for b in range(count)]

    def merge(self, metrics: Mapping[str, Metric]) -> None:
        """Merge the metrics of this rank's batches with those of the other ranks, in place."""
        if self._communicator.size == 1 or not metrics:
            return
        mergeable = {name: metric for name, metric in metrics.items() if isinstance(metric, Mergeable)}
        by_rank = self._exchange({name: metric.state_dict() for name, metric in mergeable.items()})
        for name, metric in mergeable.items():
            metric.merge([states[name] for states in by_rank])

    def _exchange(self, value: Any) -> list[Any]:
        """Exchange a value with all ranks, and return the values in the order of the ranks."""
        # JSON writes a float with as many digits as restore its bits.
        return [json.loads(each) for each in self._communicator.exchange(json.dumps(value).encode())]


def distribute_batches(communicator: Communicator | None, metrics: Mapping[str, Metric]) -> BatchDistribution:
    """Return how the batches of an evaluation are distributed.

    Args:
        communicator: The communicator that connects the ranks; None if this process evaluates all batches.
        metrics: The metrics of the evaluation. If one of them cannot be merged, each rank evaluates all batches.
    """
    together = communicator is not None and all(isinstance(each, Mergeable) for each in metrics.values())
    return BatchDistribution(communicator if communicator is not None and together else LocalCommunicator())
