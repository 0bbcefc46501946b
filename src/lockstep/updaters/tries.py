"""What is computed, and what the tries at it came to."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.precision import LossScale
from lockstep.updaters.engine import Attempt
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.result import UpdateResult


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
