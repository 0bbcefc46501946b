"""The interface of metrics: objects that are updated per batch, computed once and reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


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
