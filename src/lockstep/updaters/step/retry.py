"""Decide what follows a non-finite gradient: another attempt at a lower loss scale, or the end of the update.

Updates that are skipped are noticed: there is one warning, and a run of nothing else ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from lockstep.errors import NonFiniteError, NonFiniteWarning, warn
from lockstep.metrics import read
from lockstep.plan import Shard
from lockstep.precision import CurrentScale, first_nonfinite
from lockstep.tree import Tensors
from lockstep.updaters.attempt.attempt import Attempt, Deferral, DeferredCheck, GradientRequest
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.ranks.coordinator import Coordinator
from lockstep.updaters.result import NonFiniteShard, ShardReport, SkippedUpdate, UpdateResult
from lockstep.updaters.setup.names import Names
from lockstep.updaters.state.training import TrainingState
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


HELD: Final = 512
"""The number of the latest unread checks that are kept one by one; older ones are merged."""


@dataclass(frozen=True, slots=True)
class UnreadCheck:
    """The check of an update, or of several successive ones, that is still on the device.

    Attributes:
        first: The number of complete updates before the first of them.
        last: The number of complete updates before the last of them.
        check: The check, or the elementwise maximum of their flags.
        result: The result of the last of them.
    """

    first: int
    last: int
    check: DeferredCheck
    result: UpdateResult


class SkippedUpdates:
    """Counts updates in a row that were skipped, and names the first in a warning.

    An update that is applied calls nothing here: that a run of skipped updates has ended shows in the number of the
    next one that is skipped. Checks on a device are kept there until `read` is called.

    Args:
        training: The training state, which counts the updates.
        max_skipped: The number of skipped updates in a row that is an error; None if no number is.
    """

    def __init__(self, training: TrainingState, max_skipped: int | None) -> None:
        self._training = training
        self._max_skipped = max_skipped
        self._has_warned = self._has_warned_of_empty = False
        self._unread: list[UnreadCheck] = []
        self.forget()

    def forget(self) -> None:
        """Start anew, because a state was loaded."""
        self._unread.clear()
        self._run, self._end = 0, 0
        self.last: SkippedUpdate | None = None
        """The last skipped update; None before the first."""

    def note(self, attempt: Attempt) -> None:
        """Note the final attempt of an update before it is committed.

        Args:
            attempt: The attempt, whose gradient may be finite.

        Raises:
            NonFiniteError: If this is the last of the skipped updates that are allowed in a row.
        """
        check, iteration = attempt.overflow_check, self._training.iteration
        if isinstance(check, DeferredCheck):
            self._unread.append(UnreadCheck(iteration, iteration, check, attempt.result(applied=False)))
            if len(self._unread) >= 2 * max(HELD, self._max_skipped or 0):
                self._merge_older()
        elif check.nonfinite is not None:
            # Only where an optimizer or a hook had a check read that its predecessors had not.
            self._count_unread()
            self._count(iteration, iteration, check.nonfinite, attempt.result(applied=False))
            self._raise_if_too_many()

    def note_empty(self) -> None:
        """Note an update of which no shard has a weight above 0."""
        if not self._has_warned_of_empty:
            self._has_warned_of_empty = True
            warn(
                f"Update {self._training.iteration + 1} was skipped: all samples of its batch together have weight 0, "
                "as where every label is ignored or masked, so that there is no mean and no gradient. Weights, "
                "optimizer and scheduler stay as they are. This warning is given once per run.",
                NonFiniteWarning,
            )

    def read(self) -> SkippedUpdate | None:
        """Read the checks that are still on the device, and return the last skipped update, or None.

        There is one transfer if all gradients were finite.

        Raises:
            NonFiniteError: If the last updates were skipped, and are as many as `max_skipped`.
        """
        if self._unread:
            latest = self._unread[-1].last
            self._count_unread()
            if latest + 1 == self._end:
                self._raise_if_too_many()
        return self.last

    def _count_unread(self) -> None:
        unread, self._unread = self._unread, []
        for each, flag in zip(unread, read([each.check.found_inf for each in unread]), strict=True):
            if flag:
                self._count(each.first, each.last, str(each.check.nonfinite), each.result)

    def _count(self, first: int, last: int, parameter: str, result: UpdateResult) -> None:
        """Count updates whose gradients are known not to be finite, or of which at least one is not.

        Args:
            first: The number of complete updates before the first of them.
            last: The number of complete updates before the last of them.
            parameter: The first parameter whose gradient is not finite.
            result: The result of the last of them.
        """
        # An update of a step function has several gradients, and one that failed is repeated under its number.
        if last + 1 != self._end:
            self._run = self._run + 1 if first == self._end else 1
        self._end = last + 1
        self.last = SkippedUpdate(self._end, parameter, result.loss.item())
        if not self._has_warned:
            self._has_warned = True
            number = f"Update {self._end}" if first == last else f"An update before {self._end + 1}"
            warn(
                f"{number} was skipped: the gradient of {parameter!r} is not finite, with a loss of "
                f"{self.last.loss:g}. {self._explanation(self.last)} A log counts skipped updates as `main/skipped`. "
                "This warning is given once per run.",
                NonFiniteWarning,
            )

    def _raise_if_too_many(self) -> None:
        """Raise an error if the number of skipped updates in a row is reached, and allow as many again."""
        if self._max_skipped is None or self._run < self._max_skipped or self.last is None:
            return
        run, self._run, self._end = self._run, 0, 0
        raise NonFiniteError(
            f"{run} updates in a row (`max_skipped`) had to be skipped: the gradient of {self.last.parameter!r} is not "
            f"finite, with a loss of {self.last.loss:g}. {self._explanation(self.last)} A smaller learning rate, a "
            "warm-up and gradient clipping keep weights and gradients finite. To go on regardless, pass a larger "
            "`max_skipped`, or None.",
            parameter=self.last.parameter,
            tries=run,
        )

    def _explanation(self, skipped: SkippedUpdate) -> str:
        """Return what the weights and the loss tell about the reason, and what to do."""
        for name, parameter in self._training.replicas.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return (
                    f"The weights themselves are not finite (the first is {name!r}), so every update will be skipped. "
                    "Load a state from before."
                )
        if math.isfinite(skipped.loss):
            return (
                "The loss is finite, so the gradient overflowed in backward, or a function has no finite derivative, "
                "such as a root at 0 or one whose limit an infinity in the batch reaches: lower the loss scale, if "
                "there is one. While a dynamic loss scale adapts, a few skipped updates are usual."
            )
        return (
            "The weights are finite, so the batch or the loss function is the reason: with on_exhausted='raise' the "
            "run stops at such a batch, and `find_nonfinite()` then lists its shards and samples."
        )

    def _merge_older(self) -> None:
        """Merge the older half of the checks into one, without waiting for the device."""
        half = len(self._unread) // 2
        older, self._unread = self._unread[:half], self._unread[half:]
        latest = older[-1]
        # The names differ where a parameter was frozen or a shard reached others.
        alike = [each.check.flags for each in older if each.check.names == latest.check.names]
        merged = DeferredCheck(latest.check.names, torch.stack(alike).amax(0))
        self._unread.insert(0, UnreadCheck(older[0].first, latest.last, merged, latest.result))


def warn_of_losses(reports: Iterable[ShardReport]) -> None:
    """Warn of a shard whose loss is not finite although its gradient is, as of a mean over no elements.

    Args:
        reports: What the shards of an update measured that is about to be applied.
    """
    for each in reports:
        if each.weight and not math.isfinite(loss := each.loss.item()):
            warn(
                f"The loss of shard {each.shard} is {loss:g}, but the gradient is finite and the update is applied. Is "
                "it a mean over no elements? `loss_fn` gets the samples of one shard, and must not select some by "
                "their positions in the batch or by its size. If it compares samples, use BatchLoss.",
                NonFiniteWarning,
            )
            return
