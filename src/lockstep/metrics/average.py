"""A weighted mean of values that come one at a time and are read rarely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.metrics.mean import Mean
from lockstep.metrics.observed import Observed, as_mean, read
from lockstep.state import Stateful, check_keys

HELD = 1024
"""How many values are held before they are read: one wait for the device in so many updates."""


class Average(Stateful):
    """The weighted mean of all values since the last reset.

    For values x with weights w::

        mean = Σ w·x / Σ w

    A value of weight 0 counts for nothing, even if it is NaN.

    Values stay on their device until somebody computes the mean or 1024 of them have gathered;
    those are then read in one transfer, so memory stays bounded however long a run goes on.

    Determinism: sums are made on the host, correctly rounded over each 1024 values, so they
    depend on the values and their order alone, and a save and load in the middle changes no bit.

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
        """Whether no value with a weight came since the last reset."""
        return not self._held and not self._weight

    def update(self, value: Observed, weight: float | torch.Tensor | None = None) -> None:
        """Take one value in.

        Args:
            value: A number, a 0-d tensor, or a `Mean`, which brings its own weight.
            weight: The weight of a number or tensor, at least 0; 1 unless given.

        Raises:
            TypeError: The value is none of these, or a `Mean` came with a weight beside it.
        """
        mean = as_mean(value)
        if weight is not None:
            if isinstance(value, Mean):
                raise TypeError(f"`weight` must be left out beside a Mean, which brings its own, got {weight}.")
            mean = Mean(mean.total * weight, weight)
        self._held.append(mean)
        if len(self._held) >= HELD:
            self._total, self._weight = self._sums()
            self._held.clear()

    def compute(self) -> float:
        """Return the mean; waits for the device. NaN where the weights sum to 0."""
        total, weight = self._sums()
        return total / weight if weight else math.nan

    def reset(self) -> None:
        """Forget all values."""
        self._total, self._weight = 0.0, 0.0
        self._held.clear()

    def state_dict(self) -> dict[str, object]:
        """Return the sums so far and the values not yet summed, as numbers; waits for the device."""
        totals, weights = self._read()
        return {"total": self._total, "weight": self._weight, "held_totals": totals, "held_weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: A key is missing or unknown; nothing has been changed.
        """
        check_keys(state, ("total", "weight", "held_totals", "held_weights"), of="Average")
        pairs = zip(state["held_totals"], state["held_weights"], strict=True)
        held = [Mean(float(total), float(weight)) for total, weight in pairs]
        self._total, self._weight = float(state["total"]), float(state["weight"])
        self._held = held

    def _read(self) -> tuple[list[float], list[float]]:
        numbers = read([mean.total for mean in self._held] + [mean.weight for mean in self._held])
        return numbers[: len(self._held)], numbers[len(self._held) :]

    def _sums(self) -> tuple[float, float]:
        pairs = [pair for pair in zip(*self._read(), strict=True) if pair[1]]
        return _sum([self._total, *(total for total, _ in pairs)]), _sum(
            [self._weight, *(weight for _, weight in pairs)]
        )


def _sum(numbers: list[float]) -> float:
    """Sum exactly and round once; infinities of both signs make NaN, as ordinary addition does."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
