"""Let the user say what an update does, by any number of gradients and steps; do all of it or nothing."""

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
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.ranks import BATCHES, Described, describe_batch
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.setup import MAIN, Names, look_up
from lockstep.updaters.step.assembly import Parts


@dataclass(slots=True)
class CustomStepState:
    """One update that a step function makes.

    Attributes:
        context: The state of the calling thread.
        drawn: How many batches were taken of each iterator.
        computed: The gradients that no optimizer has stepped by, by the optimizers they are for.
        computations: How many gradients were computed.
        results: What each of them measured, with the optimizers it was for.
        applied: Whether any optimizer stepped; a tensor where only the device knows.
        described: What other ranks are told of the batches that were taken, if there are any ranks.
    """

    context: StepContext
    drawn: Counter[str]
    computed: dict[Names, Attempt] = field(default_factory=dict)
    computations: int = 0
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    applied: bool | torch.Tensor = False
    described: list[Described] = field(default_factory=list)

    def result(self, scale: MovingScale) -> UpdateResult:
        """Put together what the computations measured: all of them, and each optimizer's.

        Args:
            scale: The loss scale before.
        """
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merged([result for names, result in self.results if "+".join(names) == label], scale)
            for label in labels
        }
        found = [result for _, result in self.results]
        return _merged(found, scale, applied=self.applied, parts=parts if len(parts) > 1 else {})


class CustomStep:
    """The two halves of an update, for step functions and for loops of the user's own.

    Args:
        parts: The parts of the updater.
        usual: The gradient that an update computes unless it says otherwise.
    """

    def __init__(self, parts: Parts, usual: GradientRequest) -> None:
        self._engine = parts.engine
        self._training = parts.training
        self._coordinator = parts.coordinator
        self._arranged = parts.arranged
        self._retry = parts.retry
        self._committer = parts.committer
        self._usual = usual
        self._has_ranks = parts.communicator.size > 1
        self._has_loss = parts.recipe.loss_fn is not None or not parts.arranged.several
        self._computed: dict[Names, Attempt] = {}
        self.state: CustomStepState | None = None
        """The update that a step function is making; None where none is being run."""

    def update(self, core: Callable[[Any], object], context: StepContext) -> UpdateResult:
        """Make one update.

        Args:
            core: Called with the batch; what it asks for is the update.
            context: The state of the calling thread.

        Raises:
            BaseException: What `core` raised; everything is as it was before.
        """
        training, engine = self._training, self._engine
        self._computed = {}
        with self._coordinator.telling():
            batch = training.iterator.peek()
        scale = training.scale
        context.savepoint = savepoint = training.save()
        self.state = state = CustomStepState(context, Counter({MAIN: 1}))
        try:
            with DefaultStream(engine.group.devices[0]) as stream, self._coordinator.telling():
                stream.seed(stream_seed(engine.recipe.seed, substream(STEP) + engine.first_stream()))
                self._describe(batch, MAIN)
                core(batch)
                # A batch may have been used without a gradient of it, so those drawn are compared here as well.
                position = {"update": training.iteration, "computation": "end", BATCHES: state.described}
                self._coordinator.agree(position, context.interrupts)
            self._committer.count_or_undo(state.applied, state.drawn)
        except BaseException:
            context.interrupts.hold()
            savepoint.restore()
            training.scale = scale
            raise
        finally:
            self.state = None
        return state.result(scale)

    def compute(self, batch: Any, loss_fn: LossFunction | None, optimizer: str | None) -> UpdateResult:
        """Compute the gradient of a batch and hand it to the parameters; see `ParallelUpdater.compute_gradients`."""
        names = self._training.names_of(optimizer)
        if loss_fn is None and not self._has_loss:
            raise ValueError("`loss_fn` must be given here or to the updater, got None.")
        request = replace(
            self._usual,
            loss_fn=self._usual.loss_fn if loss_fn is None else self._arranged.loss_fn(loss_fn),
            wanted=None if optimizer is None else self._training.parameters_of(optimizer),
        )
        state = self.state
        if state is not None:
            request = replace(request, ordinal=state.computations, drawn=tuple(state.described))
            attempt = self._attempt(request, names, batch, state.context, once=False)
            state.computations += 1
            state.computed[names] = attempt
            result = attempt.result(applied=False)
            state.results.append((names, result))
            return result
        known = self._computed.get(names)
        ordinal = len(self._computed) if known is None else known.request.ordinal
        self._coordinator.begin()
        with StepContext(self._training.group) as context:
            request = replace(request, ordinal=ordinal)
            attempt = self._attempt(request, names, batch, context, once=True)
        self._computed[names] = attempt
        return attempt.result(applied=False)

    def _attempt(
        self, request: GradientRequest, names: Names, batch: Any, context: StepContext, *, once: bool
    ) -> Attempt:
        """Go through the stages of `ParallelUpdater.update`, up to the commit, for a batch of the user's own."""
        engine, attempt = self._engine, self._retry.first(request, names, [batch], once=once)
        while not attempt.is_final:
            with self._coordinator.telling():
                context.interrupts.check()
                engine.take(attempt)
                engine.plan(attempt, context)
                engine.compute(attempt, context)
                engine.reduce(attempt, context)
                engine.check(attempt)
            attempt = self._retry.after(attempt)
        self._committer.hand_over(attempt)
        return attempt

    def apply(self, optimizer: str | None) -> UpdateResult:
        """Step by the gradient that was computed; see `ParallelUpdater.apply_gradients`.

        Raises:
            OrderError: There is none for these optimizers, or it was computed before this process was forked.
        """
        names = self._training.names_of(optimizer)
        state = self.state
        if state is None:
            self._coordinator.check_process()
            attempt = _pop(self._computed, names)
            with StepContext(self._training.group) as context:
                self._coordinator.commit(context.interrupts)
                return self._committer.commit(names, attempt, context.settings, drawn={})
        attempt = _pop(state.computed, names)
        state.context.interrupts.check()
        applied = self._committer.step(names, attempt, state.context.settings)
        state.applied = state.applied | applied
        return attempt.result(applied=applied)

    def forget(self) -> None:
        """Forget gradients that were computed and not applied."""
        self._computed = {}

    def next_batch(self, name: str) -> Any:
        """Take a further batch; its iterator moves past it when the update is complete.

        Raises:
            OrderError: No step function is being run.
            StopIteration: The iterator has ended.
            KeyError: There is no iterator of this name.
        """
        state = self._running()
        batch = look_up(name, self._training.iterators).peek(state.drawn[name])
        state.drawn[name] += 1
        self._describe(batch, name)
        return batch

    def _describe(self, batch: Any, name: str) -> None:
        """Describe a batch that was taken from an iterator for the other ranks, if there are any."""
        if self._has_ranks and self.state is not None:
            self.state.described.append(describe_batch(batch, name, self._training.iteration))

    def _running(self) -> CustomStepState:
        if self.state is None:
            raise OrderError("`next_batch` must be called by a step function; elsewhere use the iterator.")
        return self.state


def _pop(computed: dict[Names, Attempt], names: Names) -> Attempt:
    """Return what was computed for some optimizers, once.

    Raises:
        OrderError: Nothing was.
    """
    if names not in computed:
        raise OrderError(
            "`apply_gradients` must follow `compute_gradients`, once for each call and for the same optimizer."
        )
    return computed.pop(names)


def _merged(
    results: Sequence[UpdateResult],
    scale: MovingScale,
    *,
    applied: bool | torch.Tensor = False,
    parts: Mapping[str, UpdateResult] | None = None,
) -> UpdateResult:
    """Take several computations as one: reports of all, the last loss scale, the most tries."""

    def last_bad() -> str | None:
        bad = [result.nonfinite for result in results if result.nonfinite is not None]
        return bad[-1] if bad else None

    return UpdateResult(
        applied=partial(bool, applied),
        tries=max((result.tries for result in results), default=0),
        loss_scale=lambda: results[-1].loss_scale if results else scale.value.factor,
        nonfinite=last_bad,
        reports=[report for result in results for report in result.reports],
        parts=parts,
    )
