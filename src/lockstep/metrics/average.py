"""Observed values, and means of them that are read from the device in one transfer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias

import torch

from lockstep.state import Stateful, check_keys


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


MAX_HELD = 1024
"""The number of values that are held before they are read, in one synchronization with the device."""


class Average(Stateful):
    """The weighted mean of all values since the last reset.

    For values x with weights w::

        mean = Σ w·x / Σ w

    A value of weight 0 is ignored, even if it is NaN.

    Values stay on their device until you compute the mean or there are 1024 of them. They are then read in one
    transfer, so memory is bounded however long a run is.

    Determinism: sums are computed on the host and correctly rounded once per 1024 values. They depend only on
    the values and their order, and saving and loading in between changes no bit.

    >>> average = Average()
    >>> average.update(0.5, weight=24)
    >>> average.update(1.0, weight=8)
    >>> average.compute()
    0.625
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._weight = 0.0
        self._held: list[Mean] = []

    @property
    def empty(self) -> bool:
        """Whether no value with a weight was added since the last reset."""
        return not self._held and not self._weight

    def update(self, value: Observed, weight: float | torch.Tensor | None = None) -> None:
        """Add one value.

        Args:
            value: A number, a 0-d tensor, or a `Mean`, which has its own weight.
            weight: The weight of a number or tensor, at least 0; by default 1.

        Raises:
            TypeError: If the value is none of these, or a weight is passed with a `Mean`.
        """
        mean = as_mean(value)
        if weight is not None:
            if isinstance(value, Mean):
                raise TypeError(f"`weight` must be omitted for a Mean, which has its own, got {weight}.")
            mean = Mean(mean.total * weight, weight)
        self._held.append(mean)
        # At a fixed count and never at a save or a `compute`, which would round the sum in other places.
        if len(self._held) >= MAX_HELD:
            self._total, self._weight = self._sums()
            self._held.clear()

    def compute(self) -> float:
        """Return the mean; NaN if the weights sum to 0. Synchronizes with the device."""
        total, weight = self._sums()
        return total / weight if weight else math.nan

    def total(self) -> float:
        """Return the sum of the values times their weights. Synchronizes with the device."""
        return self._sums()[0]

    def reset(self) -> None:
        """Discard all values."""
        self._total, self._weight = 0.0, 0.0
        self._held.clear()

    def state_dict(self) -> dict[str, object]:
        """Return the sums and the values that are not summed yet, as numbers; synchronizes with the device."""
        totals, weights = self._read()
        return {"total": self._total, "weight": self._weight, "held_totals": totals, "held_weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: If a key is missing or unknown; nothing has changed then.
        """
        check_keys(state, ("total", "weight", "held_totals", "held_weights"), of="Average")
        pairs = zip(state["held_totals"], state["held_weights"], strict=True)
        held = [Mean(float(total), float(weight)) for total, weight in pairs]
        self._total, self._weight = float(state["total"]), float(state["weight"])
        self._held = held

    def _read(self) -> tuple[list[float], list[float]]:
        """Read the held totals and weights to the host, in one transfer."""
        numbers = read([mean.total for mean in self._held] + [mean.weight for mean in self._held])
        return numbers[: len(self._held)], numbers[len(self._held) :]

    def _sums(self) -> tuple[float, float]:
        """Return the sums of totals and of weights, including the held values."""
        # A value of weight 0 may be NaN, which would spoil the sum.
        held = [pair for pair in zip(*self._read(), strict=True) if pair[1]]
        totals, weights = zip((self._total, self._weight), *held, strict=True)
        return _sum(totals), _sum(weights)


def _sum(numbers: Sequence[float]) -> float:
    """Sum exactly and round once; infinities of both signs yield NaN, as in ordinary addition."""
    # `fsum` raises an error for infinities of both signs.
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


class IntervalMeans:
    """Averages observed values by name, and reads them from their devices at the end of an interval.

    Args:
        last: The names of values for which the last one counts instead of the mean.
        sums: The names of values for which the sum counts instead of the mean. Here and in `last`, a name also stands
            for every name that ends with ``"/"`` and that name.

    Determinism: the results depend only on the values and their order, see `Average`.

    >>> means = IntervalMeans(last=["lr"], sums=[])
    >>> means.update({"main/loss": 1.0, "lr": 0.5})
    >>> means.update({"main/loss": 2.0, "lr": 0.25})
    >>> means.compute()
    {'main/loss': 1.5, 'lr': 0.25}
    """

    def __init__(self, *, last: Sequence[str], sums: Sequence[str]) -> None:
        self._last = tuple(f"/{name}" for name in last)
        self._sums = tuple(f"/{name}" for name in sums)
        self._averages: dict[str, Average] = {}

    def update(self, observation: Mapping[str, Observed], names: Collection[str] | None = None) -> None:
        """Add the values of one update; nothing is read from the device.

        Args:
            observation: The observed values by name.
            names: The names of the values to add; None for all.
        """
        for name, value in observation.items():
            if names is not None and name not in names:
                continue
            if name not in self._averages or f"/{name}".endswith(self._last):
                self._averages[name] = Average()
            self._averages[name].update(value)

    def compute(self) -> dict[str, float]:
        """Return the result of each name, in the order in which the names appeared; synchronizes with devices."""
        return {
            name: average.total() if f"/{name}".endswith(self._sums) else average.compute()
            for name, average in self._averages.items()
        }

    def clear(self) -> None:
        """Discard all values, to begin the next interval."""
        self._averages.clear()

    def state_dict(self) -> dict[str, object]:
        """Return the state of each average by name."""
        return {name: average.state_dict() for name, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; after an error nothing has been changed."""
        averages = {name: Average() for name in state}
        for name, average in averages.items():
            average.load_state_dict(state[name])
        self._averages = averages
