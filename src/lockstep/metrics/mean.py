"""A mean that can still be merged with others: its sum and its weight, kept apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean as the pair (sum, weight), so that means of unequal parts merge exactly.

    Both numbers stay on their device until somebody asks for the value.

    Args:
        total: The sum of values times weights; a number or a 0-d tensor.
        weight: The sum of the weights; a number or a 0-d tensor.

    >>> float(Mean(total=6.0, weight=4) + Mean(total=2.0, weight=1))
    1.6
    """

    total: float | torch.Tensor
    weight: float | torch.Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def __float__(self) -> float:
        """Read the value; waits for the device. NaN where the weight is 0."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else float("nan")


def merge(means: Iterable[Mean]) -> Mean:
    """Add means up, in the order given; the mean of nothing has weight 0.

    >>> merge([Mean(1.0, 1), Mean(3.0, 1)])
    Mean(total=4.0, weight=2)
    """
    return sum(means, start=Mean(0, 0))
