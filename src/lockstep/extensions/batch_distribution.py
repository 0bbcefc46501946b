"""Deal the batches of an evaluation out to the processes of a run, and put the numbers together again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lockstep.communicators import Communicator, LocalCommunicator
from lockstep.metrics import Mean, Mergeable, Metric, read_means

NOT_OWN: Final = object()
"""Stands in the place of a batch that another process evaluates."""


class Deal:
    """Who evaluates what: batch b is rank b modulo W's, of W ranks.

    Args:
        communicator: Joins the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def wanted(self, ahead: int, size: int) -> list[range]:
        """Say which samples of a batch this rank reads, all or none; see `data.Iterator.read_only`."""
        return [range(size)] if ahead % self._communicator.size == self._communicator.rank else []

    def own(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give batches, `NOT_OWN` in the place of those that are other ranks'."""
        for number, batch in enumerate(batches):
            yield batch if number % self._communicator.size == self._communicator.rank else NOT_OWN

    def gathered(self, measured: list[dict[str, Mean]]) -> list[dict[str, Mean]]:
        """Give what was measured on all batches, in their order, from what this rank measured on its own."""
        if self._communicator.size == 1:
            return measured
        said = self._exchange([read_means(means) for means in measured])
        count = sum(map(len, said))
        size = len(said)
        return [
            {name: Mean(*pair) for name, pair in said[number % size][number // size].items()} for number in range(count)
        ]

    def merge(self, metrics: Mapping[str, Metric]) -> None:
        """Make metrics of this rank's batches those of all batches."""
        if self._communicator.size == 1 or not metrics:
            return
        own = {name: metric for name, metric in metrics.items() if isinstance(metric, Mergeable)}
        said = self._exchange({name: metric.state_dict() for name, metric in own.items()})
        for name, metric in own.items():
            metric.merge([each[name] for each in said])

    def _exchange(self, value: Any) -> list[Any]:
        return [json.loads(each) for each in self._communicator.exchange(json.dumps(value).encode())]


def deal_out(communicator: Communicator | None, metrics: Mapping[str, Metric]) -> Deal:
    """Say who evaluates what.

    Args:
        communicator: Joins the processes; None where one does all of it.
        metrics: Where one of them cannot be merged, each process does all of it.
    """
    together = communicator is not None and all(isinstance(each, Mergeable) for each in metrics.values())
    return Deal(communicator if communicator is not None and together else LocalCommunicator())
