"""What is computed, and what the tries at it came to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lockstep.precision import LossScale, MovingScale, ScaleThen
from lockstep.updaters.attempt import Attempt
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
    def flag(self) -> torch.Tensor | None:
        """What leaves a step out on the device: nothing, for the host knows whether to step."""
        return None

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

    def move(self, scale: MovingScale) -> None:
        """Choose the loss scale that follows.

        Args:
            scale: The updater's; another than `given` where a second computation came between this one and
                its step. Then an overflow still lowers it, and success does not raise it.
        """
        now = scale.value
        if self.attempt.reports:
            following = self.scale.after(finite=self.attempt.nonfinite is None)
            if now is self.given or following.factor < now.factor:
                scale.value = following


@dataclass(slots=True)
class UnreadTry:
    """The only try at a batch, of which nobody has looked whether its gradient is finite.

    Attributes:
        attempt: What it came to; its verdict is on the device.
        given: The loss scale it was made with.
        factor: The factor of that.
        flag: 1 if the gradient is not finite, else 0, on the device; None where no shard took part.
        ordinal: How many computations the update made before.
    """

    attempt: Attempt
    given: ScaleThen
    factor: float | torch.Tensor
    flag: torch.Tensor | None
    ordinal: int = 0

    @property
    def movable(self) -> bool:
        """Whether there is a gradient to move weights by unless the flag says otherwise."""
        return self.flag is not None

    def result(self, *, applied: bool) -> UpdateResult:
        """Say it to the user, who may look when he likes; keeps no gradient alive."""
        verdict, factor = self.attempt.verdict, self.factor
        return UpdateResult(
            applied=lambda: applied and verdict.nonfinite is None,
            tries=1,
            loss_scale=partial(float, factor),
            nonfinite=lambda: verdict.nonfinite,
            reports=self.attempt.reports,
        )

    def move(self, scale: MovingScale) -> None:
        """Choose the loss scale that follows, on the device."""
        if self.flag is not None:
            scale.follow(self.flag, given=self.given)

    def read(self) -> Tried:
        """Look at it after all."""
        scale = self.given.value
        return Tried(self.attempt, scale, scale, 1, self.attempt.nonfinite, self.ordinal)


AnyTry: TypeAlias = Tried | UnreadTry
