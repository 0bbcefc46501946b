"""Decide what follows a non-finite gradient: another attempt at a lower loss scale, or the end of the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import NonFiniteError
from lockstep.plan import Shard
from lockstep.precision import CurrentScale, first_nonfinite
from lockstep.tree import Tensors
from lockstep.updaters.attempt.attempt import Attempt, Deferral, GradientRequest
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.ranks.coordinator import Coordinator
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.setup.names import Names
from lockstep.updaters.step.engine import GradientEngine


class OverflowRetry:
    """Returns one attempt after another, which the stages of an update fill in, until one is final.

    Args:
        engine: The gradient engine, which knows whether there is another batch.
        deferral: Decides whether the overflow check stays on the device.
        coordinator: Reports to the other ranks if the next batch cannot be loaded.
    """

    def __init__(self, engine: GradientEngine, deferral: Deferral, coordinator: Coordinator) -> None:
        self._engine, self._training, self._recipe = engine, engine.training, engine.recipe
        self._deferral, self._coordinator = deferral, coordinator
        self.num_retries = 0
        """The number of attempts after the first one of an update, since the updater was created."""

    def first_attempt(
        self, request: GradientRequest, names: Names, batches: Sequence[Any] = (), *, no_retry: bool = False
    ) -> Attempt:
        """Return the first attempt of an update.

        Args:
            request: Which gradient to compute.
            names: The optimizers that will step by it.
            batches: The batches to use; empty for the iterator's next ones.
            no_retry: Whether no other attempt may follow, whatever the gradient.
        """
        if self._recipe.on_overflow == "skip" and not no_retry and self._deferral.defers(names):
            request = replace(request, deferred=True)
        # Read once, so that all stages of the attempt and its retries start from one loss scale.
        scale = self._training.scale
        return Attempt(request, scale, scale, given_batches=batches, no_retry=no_retry or request.deferred)

    def next_attempt(self, attempt: Attempt) -> Attempt:
        """Return the attempt that follows; if none does, return the same one, marked as final.

        Args:
            attempt: The last attempt, which has completed all stages.

        Raises:
            NonFiniteError: If no attempt is left and `on_exhausted` is ``"raise"``.
        """
        self._deferral.has_tensor_weights = attempt.gradient_context.has_tensor_weights
        # Shards were left out after an interrupt, so there is no gradient to judge: the same attempt runs again.
        if not attempt.complete:
            attempt.complete = True
            return attempt
        recipe = self._recipe
        bad = None if attempt.no_retry else attempt.overflow_check.nonfinite
        if bad is None or recipe.on_overflow == "skip":
            attempt.is_final = True
            return attempt
        scale = attempt.scale.value
        lower = scale.after(finite=False)
        draws_next = recipe.on_overflow == "next" and not attempt.given_batches
        # A scale at its lower bound would only repeat the same overflow.
        exhausted = attempt.number == recipe.max_tries or lower.factor >= scale.factor
        if exhausted or (draws_next and not self._has_batches(attempt)):
            if recipe.on_exhausted == "raise":
                raise _exhausted(attempt)
            attempt.is_final = True
            return attempt
        self.num_retries += 1
        return Attempt(
            attempt.request,
            CurrentScale(lower),
            attempt.first_scale,
            given_batches=attempt.given_batches,
            number=attempt.number + 1,
            skipped_batches=attempt.consumed_batches if draws_next else attempt.skipped_batches,
            previous_nonfinite=bad,
        )

    def _has_batches(self, attempt: Attempt) -> bool:
        """Return whether there is a batch after those that the update gives up; every rank loads its own."""
        with self._coordinator.reporting_errors():
            return bool(self._engine.next_batches(attempt.consumed_batches))

    def find_nonfinite(self, request: GradientRequest, context: UpdateContext) -> list[NonFiniteShard]:
        """Compute the pending batches, and list the shards whose gradients are not finite."""
        engine, found = self._engine, list[NonFiniteShard]()

        def inspect_shard(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            name = first_nonfinite(dict(zip(engine.prepared.named_parameters, gradients, strict=True)))
            if name is not None:
                loss = report.loss.item()
                found.append(NonFiniteShard(shard.index, shard.batch, shard.samples, loss, name))

        scale = self._training.scale
        attempt = Attempt(replace(request, inspect_shard=inspect_shard), scale, scale)
        engine.take(attempt)
        engine.plan(attempt, context)
        engine.compute(attempt, context)
        engine.reduce(attempt, context)
        everywhere = found if engine.ranks is None else engine.ranks.gather_nonfinite(found)
        return sorted(everywhere, key=lambda each: each.shard)


def _exhausted(attempt: Attempt) -> NonFiniteError:
    """Return the error for an update without attempts left."""
    return NonFiniteError(
        f"The gradient of {attempt.nonfinite!r} is not finite after {attempt.number} attempts, the last with "
        f"a loss scale of {attempt.scale.value.factor}. The weights are those of the previous update.",
        parameter=str(attempt.nonfinite),
        tries=attempt.number,
    )
