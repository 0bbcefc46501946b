"""Tries at a batch, and one update made of several computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.precision import LossScale
from lockstep.replicas.settings import ThreadSettings
from lockstep.updaters.engine import Attempt
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.savepoint import Savepoint

Names = tuple[str, ...]
"""The optimizers that a gradient is for."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Which gradient to compute.

    Attributes:
        loss_fn: Of what.
        wanted: For which parameters, by ``id``; None for all.
        ordinal: How many computations the update made before.
    """

    loss_fn: LossFunction
    wanted: frozenset[int] | None = None
    ordinal: int = 0


@dataclass(slots=True)
class Tried:
    """The last try at a batch.

    Attributes:
        attempt: What it came to.
        scale: The loss scale it was made with.
        given: The loss scale of the first try.
        tries: How many there were.
        nonfinite: The first non-finite parameter of the last bad try, this one or an earlier.
        ordinal: How many computations the update made before.
    """

    attempt: Attempt
    scale: LossScale
    given: LossScale
    tries: int
    nonfinite: str | None
    ordinal: int = 0

    @property
    def movable(self) -> bool:
        """Whether there is a finite gradient to move weights by."""
        return self.attempt.nonfinite is None and bool(self.attempt.reports)

    def result(self, *, applied: bool) -> UpdateResult:
        """Say it to the user."""
        return UpdateResult(
            applied=applied,
            tries=self.tries,
            loss_scale=self.scale.factor,
            nonfinite=self.nonfinite,
            reports=self.attempt.reports,
        )

    def next_scale(self, now: LossScale) -> LossScale:
        """Give the loss scale that follows.

        Args:
            now: The updater's; another than `given` where a second computation came between this one and its
                step. Then an overflow still lowers it, and success does not raise it.
        """
        if not self.attempt.reports:
            return now
        following = self.scale.after(finite=self.attempt.nonfinite is None)
        return following if now is self.given or following.factor < now.factor else now


@dataclass(slots=True)
class Step:
    """One update that a step function makes.

    Attributes:
        interrupts: Those held during it.
        settings: What the calling thread computes under.
        savepoint: What to go back to.
        drawn: How many batches were taken of each iterator.
        computations: How many gradients were computed.
        results: What each of them measured, with the optimizers it was for.
        applied: Whether any weights moved.
    """

    interrupts: HeldInterrupts
    settings: ThreadSettings
    savepoint: Savepoint
    drawn: Counter[str]
    computations: int = 0
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    applied: bool = False

    def result(self, scale: LossScale) -> UpdateResult:
        """Put together what the computations measured: all of them, and each optimizer's."""
        found = [result for _, result in self.results]
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merged([result for names, result in self.results if "+".join(names) == label], scale)
            for label in labels
        }
        merged = _merged(found, scale)
        return UpdateResult(
            applied=self.applied,
            tries=merged.tries,
            loss_scale=merged.loss_scale,
            nonfinite=merged.nonfinite,
            reports=merged.reports,
            parts=parts if len(parts) > 1 else {},
        )


def _merged(results: Sequence[UpdateResult], scale: LossScale) -> UpdateResult:
    """Take several computations as one: reports of all, the last loss scale, the most tries."""
    bad = [result.nonfinite for result in results if result.nonfinite is not None]
    return UpdateResult(
        applied=False,
        tries=max((result.tries for result in results), default=0),
        loss_scale=results[-1].loss_scale if results else scale.factor,
        nonfinite=bad[-1] if bad else None,
        reports=[report for result in results for report in result.reports],
    )
