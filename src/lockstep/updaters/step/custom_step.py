"""Run a step function, which defines an update by any number of gradients and steps: all of it or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lockstep.errors import OrderError
from lockstep.precision import MovingScale
from lockstep.streams import STEP, DefaultStream, stream_seed, substream
from lockstep.updaters.attempt import Attempt, GradientRequest, StepContext
from lockstep.updaters.loss import LossFunction, is_summed
from lockstep.updaters.ranks import BATCHES, Described, describe_batch
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.setup import MAIN, Names, look_up
from lockstep.updaters.step.assembly import Parts


@dataclass(slots=True)
class CustomStepState:
    """The update that a step function is making.

    Attributes:
        context: The state of the calling thread.
        consumed: The number of batches taken from each iterator, by name.
        pending: The gradients that no optimizer has stepped by yet, by the optimizers they are for.
        computations: The number of gradients computed so far.
        results: What each gradient measured, with the optimizers it was for.
        applied: Whether any optimizer stepped; a tensor where only the device knows.
        described: Descriptions of the batches taken from iterators, if there are other ranks to compare them with.
    """

    context: StepContext
    consumed: Counter[str]
    pending: dict[Names, Attempt] = field(default_factory=dict)
    computations: int = 0
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    applied: bool | torch.Tensor = False
    described: list[Described] = field(default_factory=list)

    def result(self, scale: MovingScale) -> UpdateResult:
        """Merge what all gradients measured, overall and for each optimizer.

        Args:
            scale: The loss scale before the update.
        """
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merge_results([result for names, result in self.results if "+".join(names) == label], scale)
            for label in labels
        }
        found = [result for _, result in self.results]
        return _merge_results(found, scale, applied=self.applied, parts=parts if len(parts) > 1 else {})


class CustomStep:
    """The two halves of an update, for step functions and for loops that you write yourself.

    Args:
        parts: The parts of the updater.
        default_request: The gradient that an update computes by default.
    """

    def __init__(self, parts: Parts, default_request: GradientRequest) -> None:
        self._engine = parts.engine
        self._training = parts.training
        self._coordinator = parts.coordinator
        self._networks = parts.networks
        self._retry = parts.retry
        self._committer = parts.committer
        self._default_request = default_request
        self._has_ranks = parts.communicator.size > 1
        self._has_loss = parts.recipe.loss_fn is not None or not parts.networks.several
        self._pending: dict[Names, Attempt] = {}
        self.state: CustomStepState | None = None
        """The update that a step function is making; None while none runs."""

    def update(self, core: Callable[[Any], object], context: StepContext) -> UpdateResult:
        """Run a step function as one update.

        Args:
            core: Called with the batch; computes gradients and takes steps through the updater.
            context: The state of the calling thread.

        Returns:
            The merged result of all gradients.

        Raises:
            BaseException: What `core` raised; everything has been restored.
        """
        training, engine = self._training, self._engine
        self._pending = {}
        with self._coordinator.reporting_errors():
            batch = training.iterator.peek()
        scale = training.scale
        # Also kept in the context: parameters that get their shapes inside the update are added to it.
        context.savepoint = savepoint = training.save()
        self.state = state = CustomStepState(context, Counter({MAIN: 1}))
        try:
            with DefaultStream(engine.replicas.devices[0]) as stream, self._coordinator.reporting_errors():
                # The step function itself may draw random numbers. They come from a stream of this update, so that a
                # repeated update draws the same ones.
                stream.seed(stream_seed(engine.recipe.seed, substream(STEP) + engine.first_stream()))
                self._describe(batch, MAIN)
                core(batch)
                # Before counting: once the ranks have agreed, none of them may fail or deliver an interrupt.
                # A batch may have been used without a gradient of it, so all batches are compared here as well.
                position = {"update": training.iteration, "computation": "end", BATCHES: state.described}
                self._coordinator.agree(position, context.interrupts)
            self._committer.count_or_undo(state.applied, state.consumed)
        except BaseException:
            # A second Ctrl-C must not interrupt the restoring.
            context.interrupts.hold()
            savepoint.restore()
            training.scale = scale
            raise
        finally:
            self.state = None
        return state.result(scale)

    def compute(self, batch: Any, loss_fn: LossFunction | None, optimizer: str | None) -> UpdateResult:
        """Compute the gradient of a batch and assign it to parameters; see `ParallelUpdater.compute_gradients`."""
        names = self._training.names_of(optimizer)
        if loss_fn is None and not self._has_loss:
            raise ValueError("`loss_fn` must be given here or to the updater, got None.")
        loss_fn = self._default_request.loss_fn if loss_fn is None else self._networks.loss_fn(loss_fn)
        request = replace(
            self._default_request,
            loss_fn=loss_fn,
            summed=is_summed(loss_fn),
            wanted=None if optimizer is None else self._training.parameters_of(optimizer),
        )
        state = self.state
        if state is not None:
            request = replace(request, ordinal=state.computations, taken=tuple(state.described))
            attempt = self._final_attempt(request, names, batch, state.context, no_retry=False)
            state.computations += 1
            state.pending[names] = attempt
            result = attempt.result(applied=False)
            state.results.append((names, result))
            return result
        previous = self._pending.get(names)
        # A gradient that replaces one for the same optimizers uses the same random streams again.
        ordinal = len(self._pending) if previous is None else previous.request.ordinal
        self._coordinator.start_update()
        with StepContext(self._training.replicas) as context:
            request = replace(request, ordinal=ordinal)
            attempt = self._final_attempt(request, names, batch, context, no_retry=True)
        self._pending[names] = attempt
        return attempt.result(applied=False)

    def _final_attempt(
        self, request: GradientRequest, names: Names, batch: Any, context: StepContext, *, no_retry: bool
    ) -> Attempt:
        """Run the stages of `ParallelUpdater.update` before the commit for a given batch, until an attempt is final."""
        engine, attempt = self._engine, self._retry.first_attempt(request, names, [batch], no_retry=no_retry)
        while not attempt.is_final:
            with self._coordinator.reporting_errors():
                context.interrupts.check()
                engine.take(attempt)
                engine.plan(attempt, context)
                engine.compute(attempt, context)
                engine.reduce(attempt, context)
                engine.check(attempt)
            attempt = self._retry.next_attempt(attempt)
        self._committer.assign_gradients(attempt)
        return attempt

    def apply(self, optimizer: str | None) -> UpdateResult:
        """Step by the gradient that was computed; see `ParallelUpdater.apply_gradients`.

        Raises:
            OrderError: If no gradient was computed for these optimizers, or this process was forked since.
        """
        names = self._training.names_of(optimizer)
        state = self.state
        if state is None:
            self._coordinator.check_process()
            attempt = _pop(self._pending, names)
            with StepContext(self._training.replicas) as context:
                self._coordinator.hold_interrupts(context.interrupts)
                return self._committer.commit(names, attempt, context.settings, consumed={})
        attempt = _pop(state.pending, names)
        state.context.interrupts.check()
        applied = self._committer.step(names, attempt, state.context.settings)
        state.applied = state.applied | applied
        return attempt.result(applied=applied)

    def forget_gradients(self) -> None:
        """Forget gradients that were computed but not applied."""
        self._pending = {}

    def next_batch(self, name: str) -> Any:
        """Return another batch; its iterator advances when the update is complete.

        Args:
            name: The name of the iterator.

        Raises:
            OrderError: If no step function is running.
            StopIteration: If the iterator has ended.
            KeyError: If there is no iterator of this name.
        """
        state = self._running()
        # `peek` does not move the iterator, so an update that fails has consumed nothing.
        batch = look_up(name, self._training.iterators).peek(state.consumed[name])
        state.consumed[name] += 1
        self._describe(batch, name)
        return batch

    def _describe(self, batch: Any, name: str) -> None:
        """Describe a batch that was taken from an iterator, if there are other ranks to compare it with."""
        if self._has_ranks and self.state is not None:
            self.state.described.append(describe_batch(batch, name, self._training.iteration))

    def _running(self) -> CustomStepState:
        if self.state is None:
            raise OrderError("`next_batch` must be called by a step function. Elsewhere, use the iterator.")
        return self.state


def _pop(pending: dict[Names, Attempt], names: Names) -> Attempt:
    """Return the gradient for some optimizers, and forget it.

    Raises:
        OrderError: If none was computed.
    """
    if names not in pending:
        raise OrderError(
            "`apply_gradients` must follow `compute_gradients`, once for each call and for the same optimizer."
        )
    return pending.pop(names)


def _merge_results(
    results: Sequence[UpdateResult],
    scale: MovingScale,
    *,
    applied: bool | torch.Tensor = False,
    parts: Mapping[str, UpdateResult] | None = None,
) -> UpdateResult:
    """Merge several results into one, with all reports, the last loss scale and the most tries.

    Args:
        results: The results, in order.
        scale: The loss scale before the update, which counts if there are no results.
        applied: Whether weights have moved; a tensor where only the device knows.
        parts: The result for each optimizer, if there are several.
    """

    def last_bad() -> str | None:
        bad = [result.nonfinite for result in results if result.nonfinite is not None]
        return bad[-1] if bad else None

    # Functions instead of values: reading them here would wait for the device.
    return UpdateResult(
        applied=partial(bool, applied),
        tries=max((result.tries for result in results), default=0),
        loss_scale=lambda: results[-1].loss_scale if results else scale.value.factor,
        nonfinite=last_bad,
        reports=[report for result in results for report in result.reports],
        summed=bool(results) and all(result.summed for result in results),
        parts=parts,
    )
