"""Observed values (means that can be merged, numbers and 0-d tensors), and how they are read to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeAlias

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


Observed: TypeAlias = Mean | float | torch.Tensor


def as_mean(value: Observed) -> Mean:
    """Convert an observed value to a mean; a number or tensor has weight 1.

    Args:
        value: A `Mean`, a number, a 0-d array, or a 0-d tensor, which stays on its device and is detached from its
            graph.

    Raises:
        TypeError: If it is something else, or a tensor with dimensions.

    >>> as_mean(3.0)
    Mean(total=3.0, weight=1)
    """
    if isinstance(value, Mean):
        return value
    if isinstance(value, torch.Tensor):
        if value.ndim != 0:
            raise TypeError(f"An observed tensor must have no dimension, got shape {tuple(value.shape)}.")
        return Mean(value.detach(), 1)
    if isinstance(value, (int, float)):
        return Mean(value, 1)
    # Numbers and 0-d arrays of NumPy have a shape; one with dimensions must not become its only element.
    if isinstance(value, SupportsFloat) and getattr(value, "shape", ()) == ():
        return Mean(float(value), 1)
    raise TypeError(f"An observed value must be a Mean, a number or a 0-d tensor, got {type(value).__name__}.")


def read(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Read many numbers to the host, with one synchronization per device and dtype.

    Args:
        values: Numbers and 0-d tensors, on any devices.

    Returns:
        The same numbers in the same order; a float represents every value of the narrower types exactly.

    >>> read([1, torch.tensor(2.5), torch.tensor(3)])
    [1.0, 2.5, 3.0]
    """
    numbers: list[float] = [0.0] * len(values)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            kinds.setdefault((value.device, value.dtype), []).append(index)
        else:
            numbers[index] = float(value)
    for indices in kinds.values():
        # Stacked on the device, so that all numbers arrive in one transfer.
        tensors = [torch.as_tensor(values[index]) for index in indices]
        for index, number in zip(indices, torch.stack(tensors).tolist(), strict=True):
            numbers[index] = float(number)
    return numbers


def read_means(means: Mapping[str, Mean]) -> dict[str, list[float]]:
    """Return the sum and the weight of each mean, read exactly to the host.

    >>> read_means({"loss": Mean(torch.tensor(6.0), 4)})
    {'loss': [6.0, 4.0]}
    """
    numbers = read([number for mean in means.values() for number in (mean.total, mean.weight)])
    return {name: numbers[2 * index : 2 * index + 2] for index, name in enumerate(means)}
