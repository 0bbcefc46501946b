"""What a metric is: anything that is updated batch by batch, computed once and reset."""

from __future__ import annotations

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
