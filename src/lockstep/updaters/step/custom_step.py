"""Run a step function, which defines an update by any number of gradients and steps: all of it or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from lockstep.arguments import look_up
from lockstep.digest import seal
from lockstep.errors import OrderError, warn
from lockstep.precision import CurrentScale, asks_for_closure, parameters_of
from lockstep.streams import moved
from lockstep.updaters.attempt.attempt import Attempt, Described, GradientRequest
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.detectors import generator_states, left_for, read_states
from lockstep.updaters.gathering import GatheredBatch
from lockstep.updaters.loss import BatchLoss, LossFunction
from lockstep.updaters.ranks.coordinator import describe_batch
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.setup.batches import batch_size, own_iterator_error
from lockstep.updaters.setup.names import MAIN, Names
from lockstep.updaters.state.checkpoint import Savepoint
from lockstep.updaters.step.assembly import Parts


@dataclass(slots=True)
class CustomStepState:
    """The update that a step function is making.

    Attributes:
        context: The state of the calling thread.
        consumed: The number of batches taken from each iterator, by name.
        results: What each gradient measured, with the optimizers it was for.
        applied: Whether any optimizer stepped; a tensor where only the device knows.
        changed: What the shards of each gradient have changed in batches, with its former values.
        described: Descriptions of the batches taken from iterators, if there are other ranks to compare them with.
        has_ended: Whether an iterator of the updater has ended.
        num_samples: The number of samples in the batches taken from the main iterator.
    """

    context: UpdateContext
    consumed: Counter[str]
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    applied: bool | torch.Tensor = False
    changed: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    described: list[Described] = field(default_factory=list)
    has_ended: bool = False
    num_samples: int = 0

    @torch.no_grad()
    def undo_change(self) -> None:
        """Undo what the shards of the last gradient have changed in batches."""
        for tensor, before in reversed(self.changed.pop()):
            tensor.copy_(before)

    def result(self, scale: CurrentScale, optimizers: Collection[str]) -> UpdateResult:
        """Merge what all gradients measured, overall and for each optimizer.

        Args:
            scale: The loss scale before the update.
            optimizers: The names of all optimizers.
        """
        found = [result for _, result in self.results]
        # One optimizer of several has a part even if it is the only one here, because its losses would otherwise be
        # logged under another name in some updates.
        if all(set(names) == set(optimizers) for names, _ in self.results):
            return _merge_results(found, scale, self.num_samples)
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merge_results(
                [result for names, result in self.results if "+".join(names) == label], scale, self.num_samples
            )
            for label in labels
        }
        return _merge_results(found, scale, self.num_samples, parts=parts)


class CustomStep:
    """The two halves of an update, for step functions and for loops that you write yourself.

    Args:
        parts: The parts of the updater.
        default_request: The gradient that an update computes by default.
    """

    def __init__(self, parts: Parts, default_request: GradientRequest) -> None:
        self._parts = parts
        self._engine, self._training = parts.engine, parts.engine.training
        self._coordinator, self._committer = parts.coordinator, parts.committer
        self._default_request = default_request
        self._with_closure = [name for name, each in self._training.optimizers.items() if asks_for_closure(each)]
        self._pending: dict[Names, Attempt] = {}
        self._has_warned = False
        self.state: CustomStepState | None = None
        """The update that a step function is making; None while none runs."""

    def update(self, core: Callable[[Any], object], context: UpdateContext) -> UpdateResult:
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
            # Raises StopIteration where the data ends.
            batch = next(iter(engine.next_batches(0)))
        scale = training.scale
        # Also kept in the context: parameters that get their shapes inside the update are added to it.
        context.savepoint = savepoint = Savepoint(training)
        self.state = state = CustomStepState(context, Counter({MAIN: 1}))
        try:
            # The step function itself may draw random numbers. They come from a stream of this update, so that a
            # repeated update draws the same ones.
            with self._committer.stream.opened(), self._coordinator.reporting_errors():
                self._note(batch, MAIN, state)
                try:
                    core(batch)
                except StopIteration as error:
                    raise error if state.has_ended else own_iterator_error("The step function") from error
                # Before counting: once the ranks have agreed, none of them may fail or deliver an interrupt.
                # A batch may have been used without a gradient of it, so all batches are compared here as well.
                position = {"update": training.iteration, "computation": "end"}
                self._coordinator.agree(position, state.described, context.interrupts)
            self._warn_of_own_steps(savepoint, state)
            self._committer.count_or_undo(state.applied, state.consumed)
        except BaseException:
            # A second Ctrl-C must not interrupt the restoring.
            context.interrupts.hold()
            savepoint.restore()
            self._committer.mark_gradients_used()
            training.scale = scale
            while state.changed:
                state.undo_change()
            raise
        finally:
            self.state, self._pending = None, {}
        return state.result(scale, training.optimizers)

    def _warn_of_own_steps(self, savepoint: Savepoint, state: CustomStepState) -> None:
        """Warn of steps without `apply_gradients` where it would do more than step, and where it was forgotten."""
        training, names = self._training, sorted({name for pending in self._pending for name in pending})
        is_on = self._engine.auditor.is_on
        if self._has_warned or not self._engine.is_first or (state.results and not names):
            return
        optimizers = [training.optimizers[name] for name in names or training.optimizers]
        moved = savepoint.differs(each for optimizer in optimizers for each in parameters_of(optimizer))
        if is_on and names and not moved and any(group.get("lr") for each in optimizers for group in each.param_groups):
            why = (
                f"computed gradients for {names} without a step, so nothing of it was trained. Call "
                "updater.apply_gradients(optimizer=...) after updater.compute_gradients(..., optimizer=...)."
            )
        elif names and moved and (training.schedulers or self._engine.recipe.clip_grad_norm is not None):
            why = (
                f"computed gradients for {names} without apply_gradients(), so `clip_grad_norm` clips nothing and "
                "`scheduler` does not step. Call apply_gradients() instead of the optimizer's step, or leave both "
                "arguments out, and clip and schedule in the step function."
            )
        elif is_on and moved and not names:
            why = (
                "changed parameters without compute_gradients(), so one device has computed with the whole batch. Call "
                "updater.compute_gradients(batch, loss_fn=..., optimizer=...) instead of backward(), and "
                "updater.apply_gradients(optimizer=...) instead of the optimizer's step."
            )
        else:
            return
        self._has_warned = True
        warn(f"The step function has {why}")

    def compute(
        self, batch: Any, loss_fn: LossFunction | None, optimizer: str | None, buffers_of: Collection[str] | None
    ) -> UpdateResult:
        """Compute the gradient of a batch and assign it to parameters; see `ParallelUpdater.compute_gradients`."""
        names = self._training.names_of(optimizer)
        networks = self._parts.networks
        if self._engine.recipe.accumulate != 1:
            raise ValueError(
                "`accumulate` must be 1 where `compute_gradients` is called, which takes one batch, got "
                f"{self._engine.recipe.accumulate}. Pass larger batches with more shards, or call update()."
            )
        if loss_fn is None and self._engine.recipe.loss_fn is None and networks.several:
            raise ValueError("`loss_fn` must be given here or to the updater, got None.")
        if isinstance(buffers_of, str):
            raise TypeError(
                f"`buffers_of` must be a collection of names, such as [{buffers_of!r}], got {buffers_of!r}."
            )
        for network in buffers_of or ():
            look_up(network, self._training.models, "buffers_of")
        loss_fn = self._default_request.loss_fn if loss_fn is None else networks.loss_fn(loss_fn)
        request = replace(
            self._default_request,
            loss_fn=loss_fn,
            wanted=None if optimizer is None else self._training.parameters_of(optimizer),
            buffers_of=buffers_of,
        )
        state = self.state
        unused, previous = self._unused_gradient(request.wanted), self._pending.get(names)
        replaces = 0 if previous is None else previous.replaces + 1
        if state is None:
            self._committer.own_steps.check_weights([self._training.optimizers[name] for name in names], replaces)
            # A gradient that replaces one for the same optimizers uses the same random streams again.
            number = len(self._pending) if previous is None else previous.request.computation
            self._coordinator.start_update()
            # Where a plain loop begins. What a gradient has left that this one replaces is dropped with it.
            for other, pending in self._pending.items():
                if other != names:
                    self._committer.store_buffers(pending)
            with UpdateContext(self._training.replicas) as context:
                attempt = self._final_attempt(replace(request, computation=number), names, batch, context)
            self._committer.own_steps.begin(self._training.optimizers.values(), pending=True)
        else:
            request = replace(request, computation=len(state.results), taken=tuple(state.described))
            attempt = self._final_attempt(request, names, batch, state.context)
            # As the forwards of a plain loop do, whatever steps. A step that computes again may skip the whole update.
            if names[0] not in self._with_closure:
                self._committer.store_buffers(attempt)
        attempt.replaced, attempt.replaces = unused, replaces
        self._pending[names] = attempt
        result = attempt.result(applied=False)
        if state is not None:
            state.results.append((names, result))
        return result

    def _unused_gradient(self, wanted: Collection[int] | None) -> OrderError | None:
        """Return the error for a gradient that the next one replaces, to be raised if that one is stepped by."""
        if self._pending:
            try:
                self._committer.check_no_unused_gradients(wanted)
            except OrderError as error:
                self._committer.mark_gradients_used()
                return error
        return None

    def _final_attempt(self, request: GradientRequest, names: Names, batch: Any, context: UpdateContext) -> Attempt:
        """Run the stages of `ParallelUpdater.update` before the commit for a given batch, until an attempt is final."""
        gathered, engine = None, self._engine
        if isinstance(request.loss_fn, BatchLoss):
            drawn_before = generator_states([request.loss_fn.forward]) if engine.is_first else {}
            before = self._read_by(request.loss_fn.criterion) if engine.is_first else {}
            gathered = GatheredBatch(request.loss_fn, engine.replicas.model, compares=engine.is_first)
            scale = self._training.scale
            asked = replace(request, shard_loss=gathered.collect, gathers=True)
            self._run(Attempt(asked, scale, scale, given_batches=[batch], no_retry=True), context)
            if engine.is_first:
                engine.auditor.warn_of_left(left_for(before, self._read_by(request.loss_fn.criterion)))
            watching = self._committer.stream.watching([request.loss_fn.criterion])
            with self._coordinator.reporting_errors(), watching:
                gathered.differentiate(self._parts.communicator, engine.replicas.devices[0])
            if engine.is_first:
                engine.auditor.warn_of_moves(moved(drawn_before, generator_states([request.loss_fn.forward])))
            request = replace(request, shard_loss=gathered.shard_loss)
        first = self._parts.retry.first_attempt(request, names, [batch], no_retry=self.state is None)
        attempt = self._run(first, context)
        if gathered is not None and gathered.differs:
            engine.auditor.warn_of_outputs()
        self._committer.assign_gradients(attempt)
        is_first = attempt.gradient_context.is_first
        changed = engine.conversion.keep_changes(attempt.batches, attempt.device_shards, is_first=is_first)
        if self.state is not None:
            self.state.changed.append(changed)
        return attempt

    def _read_by(self, criterion: object) -> dict[str, object]:
        """Return the states of the tensors beside the model that the criterion of a `BatchLoss` refers to, by name."""
        replicas = self._engine.replicas
        return read_states([criterion], [replicas.model, *replicas.replicas], every=True)

    def _run(self, attempt: Attempt, context: UpdateContext) -> Attempt:
        """Run one attempt after another until one is final."""
        engine = self._engine
        while not attempt.is_final:
            with self._coordinator.reporting_errors():
                context.interrupts.check()
                engine.take(attempt)
                engine.plan(attempt, context)
                engine.compute(attempt, context)
                engine.reduce(attempt, context)
                engine.check(attempt)
            attempt = self._parts.retry.next_attempt(attempt)
        return attempt

    def apply(self, optimizer: str | None) -> UpdateResult:
        """Step by the gradient that was computed; see `ParallelUpdater.apply_gradients`.

        Raises:
            OrderError: If no gradient was computed for these optimizers or it has replaced another one, or this process
                was forked since, or an optimizer that computes gradients again steps outside of an update.
        """
        names = self._training.names_of(optimizer)
        state = self.state
        if state is None:
            for name in self._with_closure:
                if name in names:
                    kind = type(self._training.optimizers[name]).__name__
                    raise OrderError(
                        f"`apply_gradients` must be called by a step function for {kind}, whose step computes "
                        "gradients again. Call `update` instead, or pass `step_fn`."
                    )
            attempt = self._pop(names)
            self._coordinator.start_update()
            with UpdateContext(self._training.replicas) as context:
                self._coordinator.hold_interrupts(context.interrupts)
                return self._committer.commit(names, attempt, context.settings, consumed={})
        attempt = self._pop(names)
        state.context.interrupts.check()
        if names[0] in self._with_closure:
            attempt = self._step_with_closure(names[0], attempt, state)
            applied = attempt.applied
        else:
            applied = self._committer.step(names, attempt, state.context.settings)
        state.applied = state.applied | applied
        result = attempt.result(applied=applied)
        # What was recorded before the step does not know whether weights moved, nor the norm of the gradient.
        last = max(index for index, (each, _) in enumerate(state.results) if each == names)
        state.results[last] = names, result
        return result

    def _step_with_closure(self, name: str, attempt: Attempt, state: CustomStepState) -> Attempt:
        """Step an optimizer that computes gradients again; each time with the same batch and random streams.

        As in a loop of PyTorch, the gradient is there when the step begins, and each computation leaves its buffers in
        the model, the first one included. What the first call of the closure would compute is known already, unless
        the step has moved weights or changed gradients before, as those of sharpness-aware minimization do.

        Args:
            name: The optimizer.
            attempt: The gradient at the current weights, which was computed already.
            state: The update.

        Returns:
            The given attempt; or the one whose gradient is not finite, after the state before the step was restored.

        Raises:
            NonFiniteError: If too many updates in a row are skipped; nothing has changed then.
        """
        parameters = self._engine.prepared.parameters
        known: list[tuple[torch.Tensor, list[str]]] = []

        def seals() -> list[str]:
            # By their bits: writing to `.data` leaves the versions of tensors as they were.
            return [seal(each) for parameter in parameters for each in (parameter.detach(), parameter.grad)]

        def use(now: Attempt) -> torch.Tensor:
            self._training.scale = now.next_scale(self._training.scale)
            if not bool(now.applied):
                raise _NotFinite(now)
            self._committer.store_buffers(now)
            # A single loss as it is: in float64 its product with the weight, divided by it, may be another number, and
            # a line search compares losses.
            return now.reports[0].loss if len(now.reports) == 1 else now.result(applied=False).loss

        @torch.enable_grad()
        def closure() -> torch.Tensor:
            if known:
                loss, before = known.pop()
                if seals() == before:
                    return loss
            batch, context = attempt.given_batches[0], state.context
            self._committer.mark_gradients_used()
            state.undo_change()
            return use(self._final_attempt(attempt.request, (name,), batch, context))

        savepoint = Savepoint(self._training)
        try:
            known.append((use(attempt), seals()))
            self._committer.step_with_closure(name, closure)
        except _NotFinite as end:
            savepoint.restore()
            attempt = end.attempt
            self._committer.note((name,), attempt)
        return attempt

    def _pop(self, names: Names) -> Attempt:
        """Return the gradient for some optimizers and forget it; raise an OrderError if there is none to step by."""
        if names not in self._pending:
            raise OrderError(
                "`apply_gradients` must follow `compute_gradients`, once for each call and for the same optimizer, got "
                f"{' and '.join(names)}; gradients are there for {[*map(' and '.join, self._pending)]}."
            )
        attempt = self._pending[names]
        if attempt.replaced is not None:
            raise attempt.replaced
        return self._pending.pop(names)

    def forget_gradients(self) -> None:
        """Forget gradients that were computed but not applied."""
        self._pending = {}
        self._committer.mark_gradients_used()

    def next_batch(self, name: str) -> Any:
        """Return another batch; its iterator advances when the update is complete.

        Args:
            name: The name of the iterator.

        Raises:
            OrderError: If no step function is running.
            StopIteration: If the iterator has ended.
            KeyError: If there is no iterator of this name.
        """
        state = self.state
        if state is None:
            raise OrderError("`next_batch` must be called by a step function. Elsewhere, use the iterator.")
        # `peek` does not move the iterator, so an update that fails has consumed nothing.
        try:
            batch = look_up(name, self._training.iterators).peek(state.consumed[name])
        except StopIteration:
            state.has_ended = True
            raise
        state.consumed[name] += 1
        self._note(batch, name, state)
        return batch

    def _note(self, batch: Any, name: str, state: CustomStepState) -> None:
        """Count a batch that was taken from an iterator; describe it if there are other ranks to compare it with."""
        # A step function may take apart what is no batch of tensors.
        with suppress(TypeError, ValueError, LookupError):
            state.num_samples += batch_size(batch, self._engine.recipe.batch_dim) if name == MAIN else 0
        if self._parts.communicator.size > 1:
            state.described.append(describe_batch(batch, name, self._training.iteration))


class _NotFinite(Exception):  # noqa: N818 - ends a step, and is no error
    """A gradient that a step computed again is not finite, or no shard took part in it."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt


def _merge_results(
    results: Sequence[UpdateResult],
    scale: CurrentScale,
    num_samples: int,
    *,
    parts: Mapping[str, UpdateResult] | None = None,
) -> UpdateResult:
    """Merge several results into one, with all reports, the last loss scale and the most tries.

    Args:
        results: The results, in order.
        scale: The loss scale before the update, which counts if there are no results.
        num_samples: The number of samples of the update.
        parts: The result for each optimizer, if there are several.
    """
    # Functions instead of values: reading them here would wait for the device.
    return UpdateResult(
        applied=lambda: any(result.applied for result in results),
        tries=max((result.tries for result in results), default=0),
        loss_scale=lambda: results[-1].loss_scale if results else scale.value.factor,
        nonfinite=lambda: next((each.nonfinite for each in reversed(results) if each.nonfinite is not None), None),
        reports=[report for result in results for report in result.reports],
        summed=bool(results) and all(result.summed for result in results),
        of_batch=bool(results) and all(result.of_batch for result in results),
        parts=parts,
        skipped=_any([result.skipped_flag for result in results]),
        grad_norm=next((result.grad_norm for result in reversed(results) if result.grad_norm is not None), None),
        num_samples=num_samples,
    )


def _any(flags: Sequence[bool | torch.Tensor]) -> bool | torch.Tensor:
    """Return whether any flag is set; a tensor where only the device knows."""
    on_device = [flag for flag in flags if isinstance(flag, torch.Tensor)]
    # Not by `in`, which would compare the tensors too, and wait for the device.
    if any(flag is True for flag in flags) or not on_device:
        return any(flag is True for flag in flags)
    return reduce(torch.maximum, on_device)
