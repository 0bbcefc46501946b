"""Observe the quotient of two sums."""

from __future__ import annotations

from lockstep.metrics import Average, Mean
from lockstep.trainer import EDITOR, Extension, Trainer
from lockstep.triggers import TriggerSpec


class MicroAverage(Extension):
    """Observes the sum of one value divided by the sum of another, over the updates since it last did.

    For numerators n and denominators d of several updates::

        result = Σ n / Σ d

    Where a loss function returns the number of correct samples and the number of all, this is the accuracy over all of
    them, however they are distributed over updates. It is observed with the sum of the denominators as its weight.

    Args:
        numerator: The name of the observed value that is summed above.
        denominator: The name of the observed value that is summed below.
        result: The name of the quotient.
        trigger: The trigger that ends an interval.

    Determinism: depends only on the values and their order, see `metrics.Average`; saving and loading changes no bit.
    """

    priority = EDITOR
    _saved = ("numerator", "denominator")

    def __init__(self, numerator: str, denominator: str, result: str, *, trigger: TriggerSpec = (1, "epoch")) -> None:
        self.numerator_key = numerator
        self.denominator_key = denominator
        self.result_key = result
        self.trigger = trigger
        self._numerator = Average()
        self._denominator = Average()

    @property
    def name(self) -> str:
        """The default name, which contains that of the result."""
        return f"MicroAverage({self.result_key})"

    def collect(self, trainer: Trainer) -> None:
        """Add the values of one update, if it has observed both; nothing is read from the device."""
        observation = trainer.observation
        if self.numerator_key in observation and self.denominator_key in observation:
            self._numerator.update(observation[self.numerator_key])
            self._denominator.update(observation[self.denominator_key])

    def __call__(self, trainer: Trainer) -> None:
        """Observe the quotient, and begin the next interval; without values nothing is observed."""
        if not self._denominator.empty:
            trainer.observe(self.result_key, Mean(self._numerator.total(), self._denominator.total()))
        self._numerator.reset()
        self._denominator.reset()
