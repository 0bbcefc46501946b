"""A mean that can be merged with others: its sum and its weight, stored separately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, stored as the pair (sum, weight) so that means over unequal parts merge exactly.

    Both numbers stay on their device until the value is read.

    Args:
        total: The sum of the values times their weights, as a number or a 0-d tensor.
        weight: The sum of the weights, as a number or a 0-d tensor.

    >>> float(Mean(total=6.0, weight=4) + Mean(total=2.0, weight=1))
    1.6
    """

    total: float | torch.Tensor
    weight: float | torch.Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def __float__(self) -> float:
        """Return the value; NaN if the weight is 0. Synchronizes with the device."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else float("nan")


def merge(means: Iterable[Mean]) -> Mean:
    """Merge means in the given order; the result for no means has weight 0.

    >>> merge([Mean(1.0, 1), Mean(3.0, 1)])
    Mean(total=4.0, weight=2)
    """
    return sum(means, start=Mean(0, 0))
