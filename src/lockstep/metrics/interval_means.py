"""The means of all observed values over an interval, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lockstep.metrics.average import Average
from lockstep.metrics.observed import Observed


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
        self._last = (frozenset(last), tuple(f"/{name}" for name in last))
        self._sums = (frozenset(sums), tuple(f"/{name}" for name in sums))
        self._averages: dict[str, Average] = {}

    def update(self, observation: Mapping[str, Observed], names: Collection[str] | None = None) -> None:
        """Add the values of one update; nothing is read from the device.

        Args:
            observation: The observed values by name.
            names: The names of the values to add; None for all.
        """
        exact, suffixes = self._last
        for name, value in observation.items():
            if names is not None and name not in names:
                continue
            if name not in self._averages or name in exact or name.endswith(suffixes):
                self._averages[name] = Average()
            self._averages[name].update(value)

    def compute(self) -> dict[str, float]:
        """Return the result of each name, in the order in which the names appeared; synchronizes with devices."""
        exact, suffixes = self._sums
        return {
            name: average.total() if name in exact or name.endswith(suffixes) else average.compute()
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
