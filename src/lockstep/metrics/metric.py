"""What a metric is: anything that is updated batch by batch, computed once and reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """A number about many batches; the metrics of torchmetrics and of ignite have these three methods too."""

    def update(self, output: Any, target: Any, /) -> Any:
        """Take one batch in.

        Args:
            output: What the model returned for the batch.
            target: What it should have returned.
        """

    def compute(self) -> Any:
        """Return the value over all batches since the last reset: a number or a 0-d tensor."""

    def reset(self) -> Any:
        """Forget all batches."""


@runtime_checkable
class Mergeable(Metric, Protocol):
    """A metric that processes can compute together, each on some of the batches."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was counted, as numbers."""

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Any:
        """Become the metric of all batches that these states are of.

        Args:
            states: What `state_dict` of metrics like this one returned, its own among them.
        """
