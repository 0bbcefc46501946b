"""Compute the gradient of a batch, at ever lower loss scales where it is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import NonFiniteError
from lockstep.replicas.settings import ThreadSettings
from lockstep.updaters import lazy
from lockstep.updaters.attempt import Attempt
from lockstep.updaters.batches import call_arguments
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.lanes import computation_lane
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.meeting import Meeting, Position
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.result import NonFiniteShard
from lockstep.updaters.savepoint import Savepoint
from lockstep.updaters.training import Training
from lockstep.updaters.tries import Computation, Tried, UnreadTry


class Trier:
    """Makes the tries of an update; nothing of the training state changes by them.

    Args:
        engine: Computes gradients.
        training: What they are computed for; the loss scale and the position in the random streams are its.
        recipe: Says what follows an overflow.
        meeting: Where other ranks are told that a try cannot be made.
    """

    def __init__(self, engine: GradientEngine, training: Training, recipe: Recipe, meeting: Meeting) -> None:
        self._meeting = meeting
        self._engine = engine
        self._training = training
        self._recipe = recipe
        self._uninitialised = False
        self.look_for_shapes()

    def look_for_shapes(self) -> None:
        """Look whether parameters lack their shapes, after something else may have given or taken them."""
        self._uninitialised = lazy.is_uninitialised(self._engine.group.model)

    def first_stream(self) -> int:
        """Give the position of this update's first stream within a lane."""
        # Fewer batches than usual, at the end, leave positions unused; none is ever used twice.
        return self._training.iteration * self._recipe.accumulate * self._engine.shards_a_batch

    def try_batches(
        self, interrupts: HeldInterrupts, settings: ThreadSettings, computation: Computation
    ) -> tuple[int, Tried]:
        """Try the iterator's batches, until a gradient is finite or no try is left.

        Returns:
            How many batches the iterator is to move past, and the last try.

        Raises:
            StopIteration: The iterator has ended.
            NonFiniteError: No try is left, if that shall raise.
            ReplicaError: User code raised in a shard.
        """
        given = scale = self._training.loss_scale
        nonfinite, tries, passed = None, 0, 0
        batches = self._pending(passed)
        while True:
            attempt = self._attempt(batches, scale.factor, settings, computation, interrupts)
            tries += 1
            bad = attempt.nonfinite
            nonfinite = bad or nonfinite
            tried = Tried(attempt, scale, given, tries, nonfinite)
            behind = passed + len(batches)
            if bad is None or self._recipe.on_overflow == "skip":
                return behind, tried
            lower = scale.after(finite=False)
            following = self._following(behind) if self._recipe.on_overflow == "next" else batches
            if tries == self._recipe.max_tries or lower.factor >= scale.factor or not following:
                self._give_up(tried)
                return behind, tried
            if self._recipe.on_overflow == "next":
                passed, batches = behind, following
            scale = lower

    def try_batch(
        self,
        batch: Any,
        interrupts: HeldInterrupts,
        settings: ThreadSettings,
        computation: Computation,
        *,
        savepoint: Savepoint,
    ) -> Tried:
        """Try one batch for a step function, until its gradient is finite or no try is left.

        Args:
            batch: Any.
            interrupts: Looked at before and after each try.
            settings: What the calling thread computes under.
            computation: Which gradient.
            savepoint: Told of parameters that get their shapes.

        Raises:
            NonFiniteError: No try is left, if that shall raise.
            ReplicaError: User code raised in a shard.
        """
        given = scale = self._training.loss_scale
        nonfinite, tries = None, 0
        while True:
            interrupts.check()
            attempt = self._attempt(
                [batch], scale.factor, settings, computation, interrupts, savepoint=savepoint
            )
            tries += 1
            bad = attempt.nonfinite
            nonfinite = bad or nonfinite
            tried = Tried(attempt, scale, given, tries, nonfinite, computation.ordinal)
            if bad is None or self._recipe.on_overflow == "skip":
                return tried
            lower = scale.after(finite=False)
            if tries == self._recipe.max_tries or lower.factor >= scale.factor:
                self._give_up(tried)
                return tried
            scale = lower

    def try_once(
        self, batch: Any, interrupts: HeldInterrupts, settings: ThreadSettings, computation: Computation
    ) -> Tried:
        """Try one batch once, at today's loss scale.

        Raises:
            ReplicaError: User code raised in a shard.
        """
        scale = self._training.loss_scale
        attempt = self._attempt([batch], scale.factor, settings, computation, interrupts)
        return Tried(attempt, scale, scale, 1, attempt.nonfinite, computation.ordinal)

    def try_unread(
        self, interrupts: HeldInterrupts, settings: ThreadSettings, computation: Computation
    ) -> tuple[int, UnreadTry]:
        """Try the iterator's next batches once, and look at nothing on the device.

        Returns:
            How many batches the iterator is to move past, and the try.

        Raises:
            StopIteration: The iterator has ended.
            ReplicaError: User code raised in a shard.
        """
        batches = self._pending(0)
        return len(batches), self._unread(batches, settings, computation, interrupts)

    def try_batch_unread(
        self,
        batch: Any,
        interrupts: HeldInterrupts,
        settings: ThreadSettings,
        computation: Computation,
        *,
        savepoint: Savepoint,
    ) -> UnreadTry:
        """Do what `try_batch` does where there is but one try, and look at nothing on the device.

        Raises:
            ReplicaError: User code raised in a shard.
        """
        interrupts.check()
        return self._unread([batch], settings, computation, interrupts, savepoint=savepoint)

    def _unread(
        self,
        batches: Sequence[Any],
        settings: ThreadSettings,
        computation: Computation,
        interrupts: HeldInterrupts,
        *,
        savepoint: Savepoint | None = None,
    ) -> UnreadTry:
        given = self._training.scale.now
        factor = given.value.factor if given.is_fixed else given.factor_on(self._engine.group.devices[0])
        attempt = self._attempt(
            batches, factor, settings, computation, interrupts, savepoint=savepoint, unread=True
        )
        return UnreadTry(attempt, given, factor, attempt.verdict.flag, computation.ordinal)

    def _attempt(
        self,
        batches: Sequence[Any],
        factor: float | torch.Tensor,
        settings: ThreadSettings,
        computation: Computation,
        interrupts: HeldInterrupts,
        *,
        savepoint: Savepoint | None = None,
        unread: bool = False,
    ) -> Attempt:
        """Compute a gradient, changing nothing but parameters that have no shape yet."""
        with self._meeting.telling():
            if self._uninitialised:
                self._initialise(batches[0], computation.loss_fn, savepoint)
            first, ordinal = self.first_stream(), computation.ordinal
            attempt = None
            # An interrupt whose handler lets the work go on may have kept shards from being computed.
            while attempt is None:
                attempt = self._engine.attempt(
                    batches,
                    loss_fn=computation.loss_fn,
                    first_stream=first + computation_lane(ordinal) if ordinal else first,
                    loss_scale=factor,
                    settings=settings,
                    position=self.position(computation=ordinal, factor=factor),
                    interrupted=interrupts.check,
                    wanted=computation.wanted,
                    unread=unread,
                )
            return attempt

    def position(self, *, computation: int | str, factor: float | torch.Tensor | None = None) -> Position:
        """Say where this rank is, for the others to compare."""
        return {
            "update": self._training.iteration,
            "computation": computation,
            "loss scale": factor,
        }

    def find_nonfinite(self, settings: ThreadSettings, loss_fn: LossFunction) -> list[NonFiniteShard]:
        """Run the pending batches at today's loss scale, and list the shards with bad gradients.

        Raises:
            StopIteration: The iterator has ended.
            ReplicaError: User code raised in a shard.
        """
        batches, factor = self._pending(0), self._training.loss_scale.factor
        with self._meeting.telling():
            return self._engine.find_nonfinite(
                batches,
                loss_fn=loss_fn,
                first_stream=self.first_stream(),
                loss_scale=factor,
                settings=settings,
                position=self.position(computation="search for what is not finite", factor=factor),
                interrupted=lambda: False,
            )

    def _pending(self, passed: int) -> list[Any]:
        self._engine.phase("data loading")
        with self._meeting.telling():
            batches = self._next_batches(passed)
            if not batches:
                raise StopIteration
            return batches

    def _following(self, passed: int) -> list[Any]:
        with self._meeting.telling():
            return self._next_batches(passed)

    def _next_batches(self, passed: int) -> list[Any]:
        """Look at the batches of one try without moving the iterator; fewer where it ends, or none.

        Args:
            passed: How many batches were given up in this update already.
        """
        batches: list[Any] = []
        iterator = self._training.iterator
        try:
            for ahead in range(passed, passed + self._recipe.accumulate):
                batches.append(iterator.peek(ahead))  # noqa: PERF401 - what came first is kept
        except StopIteration:
            pass
        return batches

    def _initialise(self, batch: Any, loss_fn: LossFunction, savepoint: Savepoint | None) -> None:
        """Give shapes and values to parameters that lack them."""
        group = self._engine.group
        args, kwargs = call_arguments(self._engine.first_shard(batch))
        lazy.initialise(
            group.model,
            lambda: loss_fn(group.model, *args, **kwargs),
            device=group.devices[0],
            seed=self._recipe.seed,
        )
        self.look_for_shapes()
        if savepoint is not None:
            savepoint.include(group.model)

    def _give_up(self, tried: Tried) -> None:
        if self._recipe.on_exhausted == "raise":
            raise NonFiniteError(
                f"The gradient of {tried.nonfinite!r} is not finite after {tried.tries} tries, the last with "
                f"a loss scale of {tried.scale.factor}. The weights are those of the update before.",
                parameter=str(tried.nonfinite),
                tries=tried.tries,
            )
