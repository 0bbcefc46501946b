"""The last stage of an update, and the only one that changes the training state: step, replace the buffers, count.

Warnings of steps that a program makes beside those of the updater belong here, too, as they count both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter, eq, methodcaller
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.digest import checksum
from lockstep.errors import collect_error, warn
from lockstep.precision import ChangesOnlyGradients, parameters_of
from lockstep.replicas import ThreadSettings, apply_tensor_hooks, combine_buffers
from lockstep.strides import laid_out_for
from lockstep.tree import Tensors
from lockstep.updaters.attempt.attempt import FINITE, Attempt, Deferral
from lockstep.updaters.attempt.step_stream import StepStream
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.setup.names import MAIN, Names
from lockstep.updaters.state.checkpoint import Savepoint
from lockstep.updaters.step.checks import (
    CONSUME,
    GRADIENT_OF,
    PRESENT,
    USED_SEED,
    USED_VERSION,
    VERSION_OF,
    check_no_unused_gradients,
    clipping_norms,
)
from lockstep.updaters.step.engine import GradientEngine
from lockstep.updaters.step.optimizer_step import NO_STREAM, OpenStream, OptimizerStep
from lockstep.updaters.step.retry import SkippedUpdates, warn_of_losses
from lockstep.updaters.step.sharing import SharedStep

COUNTS_EPOCHS: Final = ("new_epoch", "use_auto_new_epoch")
"""The method and the attribute of an optimizer that counts epochs, as those of lockstep do."""
WATCHED_UPDATES: Final = 3
"""The number of updates after each of which steps of optimizers are noticed, so that this costs nothing later."""


class _Check(ChangesOnlyGradients):
    """A step hook that changes nothing at all.

    Args:
        check: Called with the optimizer.
    """

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self._check = check

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        self._check(optimizer)


def _position_of(scheduler: LRScheduler) -> int:
    """Return how often a scheduler has stepped: of a `ChainedScheduler`, which does not count, its first one."""
    held = vars(scheduler)
    return _position_of(held["_schedulers"][0]) if "last_epoch" not in held else scheduler.last_epoch


class OwnSteps:
    """Warns once if an optimizer steps beside an updater, and once if a scheduler steps twice."""

    def __init__(self) -> None:
        self.left = WATCHED_UPDATES
        """The number of updates after which steps are still to be noticed."""
        self.watches: list[Any] = []
        """The handles of the hooks; empty while nothing is noticed."""
        self._positions: dict[int, int] = {}
        self._weights: list[int] = []
        self._pending = False
        self._warned: set[str] = set()

    def begin(self, optimizers: Iterable[Optimizer], *, pending: bool = False) -> None:
        """Notice steps of optimizers from the end of an update, or of its first half, to the next call of the updater.

        Args:
            optimizers: The optimizers of the updater.
            pending: Whether the updater has computed a gradient and has not stepped by it.
        """
        self.end()
        self._pending = pending
        if self.left:
            self.left -= 1
            check = _Check(self._check_gradients)
            self.watches = [each.register_step_pre_hook(check) for each in optimizers]

    def end(self) -> None:
        """Stop noticing, before optimizers step in an update."""
        for handle in self.watches:
            handle.remove()
        self.watches.clear()

    def forget(self) -> None:
        """Forget where schedulers stood, because a state is loaded."""
        self._positions.clear()

    def check(self, schedulers: Mapping[str, LRScheduler]) -> None:
        """Warn of a scheduler that has stepped since the updater stepped it, before the updater steps it again.

        Args:
            schedulers: The schedulers by name.
        """
        for scheduler in schedulers.values():
            position = _position_of(scheduler)
            if position > self._positions.get(id(scheduler), position):
                self._warn(
                    "scheduler",
                    f"A {type(scheduler).__name__} has stepped between two updates, although the updater steps it "
                    "(`scheduler`), so that it steps twice. Leave out your call of scheduler.step() or the "
                    "StepScheduler, or do not give it to the updater.",
                )

    def note(self, schedulers: Mapping[str, LRScheduler]) -> None:
        """Remember where schedulers stand after the updater has stepped them.

        Args:
            schedulers: The schedulers by name.
        """
        self._positions.update((id(each), _position_of(each)) for each in schedulers.values())

    def check_weights(self, optimizers: Iterable[Optimizer], replaces: int) -> None:
        """Warn if weights have moved between gradients that the updater has not stepped by, the third and the fourth.

        With fewer of them, as where the gradient at other weights is wanted, the updater may step by the last one.

        Args:
            optimizers: The optimizers whose gradient is computed next.
            replaces: The number of gradients in a row before it by which they have not stepped.
        """
        if replaces not in (WATCHED_UPDATES - 1, WATCHED_UPDATES):
            return
        before = self._weights
        self._weights = [checksum(each.detach()) for one in optimizers for each in parameters_of(one)]
        if replaces == WATCHED_UPDATES and self._weights != before:
            self._warn(
                "optimizer",
                "Weights have moved after compute_gradients() was called several times without apply_gradients(), so "
                "no update is counted: the shards draw the same random numbers again, what they leave in buffers, such "
                "as batch statistics, is lost, and schedulers and the loss scale stand still. Give the optimizer that "
                "steps to the updater, and call apply_gradients() for each step, in your loop or in a `step_fn`.",
            )

    def _check_gradients(self, optimizer: Optimizer) -> None:
        gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
        if self._pending:
            self._warn(
                "optimizer",
                f"{type(optimizer).__name__}.step() is called after compute_gradients(), so the update is not counted: "
                "the shards draw the same random numbers again, and schedulers and the loss scale stand still. Call "
                "apply_gradients() instead.",
            )
        # Without any gradient it is called by a loss function, while an update runs, or is in vain.
        elif not gradients or any(each.__dict__.get(USED_VERSION) == each._version for each in gradients):
            self._warn(
                "optimizer",
                f"{type(optimizer).__name__}.step() is called although update() steps, by the gradient by which it has "
                "moved the weights already, or by none. Leave the call out.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)


BACKWARD_HOOKS_OF: Final = attrgetter("_backward_hooks")
FORM_OF: Final = attrgetter("dtype", "layout")
STRIDES_OF: Final = methodcaller("stride")


def _fit(parameters: Sequence[nn.Parameter], gradients: Tensors) -> bool:
    """Return whether each parameter has a gradient that can be assigned as it is."""
    return (
        all(map(PRESENT, gradients))
        and not any(map(BACKWARD_HOOKS_OF, parameters))
        and all(map(eq, map(FORM_OF, gradients), map(FORM_OF, parameters)))
        and all(map(eq, map(STRIDES_OF, gradients), map(STRIDES_OF, parameters)))
    )


class Committer:
    """Commits attempts.

    Args:
        engine: The gradient engine that made the attempts.
        deferral: Decides whether a deferred check is read after all.
        shared: The steps of optimizers that the ranks share out, by name.

    Attributes:
        deferral: Decides whether the overflow check stays on the device.
        skips: Notices updates that are skipped.
        stream: The stream of what an update draws after its shards.
    """

    def __init__(self, engine: GradientEngine, deferral: Deferral, *, shared: Mapping[str, SharedStep]) -> None:
        training, recipe = engine.training, engine.recipe
        norms = clipping_norms(recipe.clip_grad_norm, training.optimizers)
        self._clips = bool(norms)
        self.deferral = deferral
        self.skips = SkippedUpdates(training, recipe.max_skipped)
        self._engine = engine
        self._training = training
        self._steps = {
            name: OptimizerStep(each, training.masters.get(name), norms.get(name), shared.get(name))
            for name, each in training.optimizers.items()
        }
        self.stream = StepStream(engine.replicas.devices[0], recipe.seed, engine.first_stream, lambda: engine.is_first)
        self.own_steps = OwnSteps()
        optimizers = training.optimizers.values() if recipe.auto_new_epoch else ()
        self._counting: list[Any] = [each for each in optimizers if all(map(partial(hasattr, each), COUNTS_EPOCHS))]
        for optimizer in self._counting:
            optimizer.use_auto_new_epoch = True

    def assign_gradients(self, attempt: Attempt) -> None:
        """Store the gradients of an attempt where optimizers read them.

        Tensor hooks that the user registered on a parameter run once, as they would in a hand-written loop.
        """
        # The user may have written to weights between updates. Master weights must follow before the step.
        for each in self._training.masters.values():
            each.refresh()
        parameters = self._engine.prepared.parameters
        if attempt.request.wanted is None and not self._training.masters and _fit(parameters, attempt.gradients):
            CONSUME(map(setattr, parameters, repeat("grad"), attempt.gradients))
            CONSUME(map(setattr, self._engine.prepared.frozen, repeat("grad"), repeat(None)))
        elif any(map(BACKWARD_HOOKS_OF, parameters)):
            hooks = [hook for parameter in parameters for hook in (parameter._backward_hooks or {}).values()]
            with self.stream.opened(attempt, hooks):
                self._assign(attempt)
        else:
            self._assign(attempt)
        attempt.gradients_assigned = True

    def _assign(self, attempt: Attempt) -> None:
        """Run tensor hooks, and store the gradients."""
        masters = self._training.masters
        prepared, wanted = self._engine.prepared, attempt.request.wanted
        for parameter in prepared.frozen:
            # A parameter that has been frozen since still has the gradient of its last update, by which an optimizer
            # would move it.
            parameter.grad = None
        for parameter, gradient in zip(prepared.parameters, attempt.gradients, strict=True):
            if wanted is not None and id(parameter) not in wanted:
                continue
            if gradient is not None and parameter._backward_hooks:
                gradient = apply_tensor_hooks(parameter, gradient)  # noqa: PLW2901 - a hook may replace it
            target = self._gradient_target(parameter) if masters else parameter
            if gradient is not None:
                # A half-precision parameter that belongs to no optimizer has no master weight, and gets its float32
                # gradient converted.
                if gradient.dtype is not target.dtype:
                    gradient = gradient.to(target.dtype)  # noqa: PLW2901 - replaces it
                if gradient.layout is torch.strided and gradient.stride() != target.stride():
                    # Gradients from other ranks or from a hook may have other strides than the weight, which fused
                    # kernels ignore.
                    gradient = laid_out_for(target, gradient)  # noqa: PLW2901 - see above
            target.grad = gradient

    def check_no_unused_gradients(self, wanted: Collection[int] | None) -> None:
        """Refuse gradients that no optimizer has used, at master weights where there are any.

        Args:
            wanted: The ``id`` of the parameters that are about to get a gradient, or None for all.

        Raises:
            OrderError: If a gradient is neither that of a finished update nor zero.
        """
        named = self._engine.prepared.named_parameters.items()
        targets = {name: self._gradient_target(each) for name, each in named if wanted is None or id(each) in wanted}
        check_no_unused_gradients(targets, None, self._engine.used_at, self._training.optimizers.values())

    def _gradient_target(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter or master weight whose ``grad`` an optimizer reads."""
        for masters in self._training.masters.values():
            parameter = masters.gradient_target(parameter)
        return parameter

    def commit(
        self, names: Names, attempt: Attempt, settings: ThreadSettings, *, consumed: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights if the gradient is finite, and count the update in any case.

        A single optimizer cannot return to the state before its step and need not: errors that follow are raised after
        the update is complete. Several optimizers return to the state before the first step.

        Args:
            names: The optimizers that step.
            attempt: The attempt to step by.
            settings: The settings of the calling thread.
            consumed: The number of batches to advance by, for each iterator by name.

        Returns:
            The result of the update.
        """
        if self._training.masters and not attempt.gradients_assigned:
            self.check_no_unused_gradients(attempt.request.wanted)
        savepoint = None
        try:
            if not attempt.gradients_assigned:
                self.assign_gradients(attempt)
            if attempt.overflow_check is not FINITE or not attempt.reports:
                self.note(names, attempt)
            if len(names) > 1:
                # One optimizer cannot take its step back, so the state is copied first. A single one saves this copy.
                savepoint = Savepoint(self._training)
            applied = attempt.applied
            late_errors = [] if applied is False else self._apply(names, attempt, settings)
            if savepoint is None:
                late_errors += self._count(applied, consumed)
            else:
                _raise_first(late_errors)
                self.count_or_undo(applied, consumed)
            # Before errors of user code are raised: the update counts as done, and its scale must not be lost.
            self._training.scale = attempt.next_scale(self._training.scale)
        except BaseException:
            if savepoint is not None:
                savepoint.restore()
            self.mark_gradients_used()
            raise
        if late_errors:
            _raise_first(late_errors)
        return attempt.result(applied=applied)

    def mark_gradients_used(self) -> None:
        """Note that the gradients need not be kept; a later change, as by another backward, ends this."""
        parameters = self._engine.prepared.parameters
        self._engine.used_at = dict(zip(map(id, parameters), map(VERSION_OF, parameters), strict=True))
        gradients = list(filter(PRESENT, map(GRADIENT_OF, parameters)))
        CONSUME(map(setattr, gradients, repeat(USED_VERSION), map(VERSION_OF, gradients)))
        for parameter in parameters:
            if parameter.grad is not None:
                setattr(parameter.grad, USED_SEED, (self._engine.recipe.seed, parameter._version))
                break
        for masters in self._training.masters.values():
            masters.drop_gradients()
        if self.own_steps.left:
            self.own_steps.begin(self._training.optimizers.values())

    def step(self, names: Names, attempt: Attempt, settings: ThreadSettings) -> bool | torch.Tensor:
        """Step without counting, and raise errors of user code at once.

        The caller must restore the state after an exception.

        Args:
            names: The optimizers that step.
            attempt: The attempt to step by.
            settings: The settings of the calling thread.

        Returns:
            Whether weights have moved; a tensor where only the device knows.
        """
        if attempt.overflow_check is not FINITE or not attempt.reports:
            self.note(names, attempt)
        applied = attempt.applied
        if applied is not False:
            _raise_first(self._apply(names, attempt, settings))
        self.mark_gradients_used()
        self._training.scale = attempt.next_scale(self._training.scale)
        return applied

    def note(self, names: Names, attempt: Attempt) -> None:
        """Read a deferred check if it is needed by now, and note an update that may be skipped.

        Args:
            names: The optimizers that the gradient is for.
            attempt: The final attempt, whose gradient may be finite.

        Raises:
            NonFiniteError: If too many updates in a row are skipped; nothing has changed then.
        """
        if not attempt.reports:
            self.skips.note_empty()
        # A hook or a scheduler that the user has added since the first stage may need the check on the host.
        if attempt.overflow_check.found_inf is not None:
            attempt.overflow_check = self.deferral.read_if_needed(attempt.overflow_check, names)
        self.skips.note(attempt)

    def _apply(self, names: Names, attempt: Attempt, settings: ThreadSettings) -> list[BaseException]:
        """Step the optimizers, then store the new buffers in the model.

        Returns:
            The errors that user code raised after the weights had moved. The step is complete nevertheless.

        Raises:
            BaseException: An error that was raised before the first weight moved, or in the middle of the step.
        """
        engine, found_inf = self._engine, attempt.overflow_check.found_inf
        engine.watch.phase = "optimizer"
        if self.own_steps.watches:
            self.own_steps.end()
        prepared, replicas = engine.prepared, engine.replicas
        num_devices = len(replicas.devices) if prepared.tree_sum.is_parallel else 1
        run = partial(replicas.run, settings=settings)
        if attempt.gradient_context.at_start and attempt.overflow_check is FINITE:
            warn_of_losses(attempt.reports)
        late_errors: list[BaseException] = []
        draws = partial(self.stream.opened, attempt)
        steps = list(map(self._steps.__getitem__, names))
        with self._storing_buffers(attempt, steps) if prepared.buffer_refs else NO_STREAM:
            for each in steps:
                error = each.step(num_devices=num_devices, run=run, draws=draws, found_inf=found_inf)
                if error is not None:
                    late_errors.append(error)
        if self._clips:
            attempt.grad_norm = _total_norm([each.grad_norm for each in steps if each.grad_norm is not None])
        if attempt.carried is not None:
            self._training.keep_carried(attempt.carried, unless=found_inf)
        if self._training.schedulers:
            late_errors += self._step_schedulers(names, draws)
        return late_errors

    @contextmanager
    def _storing_buffers(self, attempt: Attempt, steps: Sequence[OptimizerStep]) -> Iterator[None]:
        """Store the new buffers in the model around the steps; after an error they are those of before.

        Args:
            attempt: The attempt, whose buffers are stored.
            steps: What runs within the ``with`` block.
        """
        if not any(each.runs_other_code for each in steps):
            yield
            self.store_buffers(attempt)
            return
        # A hook, or an optimizer of your own, that reads buffers finds those that the forward has left.
        buffers = [ref.get() for ref in self._engine.prepared.buffer_refs]
        before = [(each, each.clone()) for each in buffers if each is not None]
        self.store_buffers(attempt)
        try:
            yield
        except BaseException:
            for buffer, value in before:
                buffer.copy_(value)
            raise

    def _step_schedulers(self, names: Names, draws: OpenStream) -> list[BaseException]:
        """Step the schedulers of optimizers that have moved weights.

        Args:
            names: The optimizers that have stepped.
            draws: Opens the stream of what a function draws.

        Returns:
            The errors that they raised.
        """
        late_errors: list[BaseException] = []
        self.own_steps.check(self._training.schedulers)
        for scheduler in self._training.schedulers.values():
            if any(scheduler.optimizer is self._training.optimizers[name] for name in names):
                is_known = type(scheduler).__module__.startswith(("torch.", "lockstep."))
                with NO_STREAM if is_known else draws([scheduler]):
                    late_errors += collect_error(scheduler.step)
        self.own_steps.note(self._training.schedulers)
        return late_errors

    def step_with_closure(self, name: str, closure: Callable[[], torch.Tensor]) -> None:
        """Step an optimizer that computes gradients again by a closure, without counting.

        The caller must restore the state after an exception, which may be raised when some weights have moved.

        Args:
            name: The optimizer that steps.
            closure: Computes the loss, stores its gradients where the optimizer reads them, and returns it.
        """
        optimizer = self._training.optimizers[name]
        self._engine.watch.phase = "optimizer"
        self.own_steps.end()
        optimizer.step(closure)  # type: ignore[arg-type]  # typed as returning a float, which a tensor can be
        _raise_first(self._step_schedulers((name,), partial(self.stream.opened, None)))

    def store_buffers(self, attempt: Attempt) -> None:
        """Write the combined buffers of an attempt's shards, once, to the models whose buffers it may change."""
        refs, found_inf = self._engine.prepared.buffer_refs, attempt.overflow_check.found_inf
        if not (refs and attempt.buffer_sums) or attempt.applied is False:
            return
        wanted = attempt.request.buffers_of
        others = () if wanted is None else [each for name, each in self._training.models.items() if name not in wanted]
        kept = [(buffer, buffer.detach().clone()) for network in others for buffer in network.buffers()]
        combine_buffers(attempt.buffer_sums, refs, weight=attempt.buffer_weight, found_inf=found_inf)
        attempt.buffer_sums = ()
        for buffer, before in kept:
            buffer.detach().copy_(before)

    def _count(self, applied: bool | torch.Tensor, consumed: Mapping[str, int]) -> list[BaseException]:
        """Count the update, advance its iterators, and begin the epochs that follow.

        Returns:
            The errors that user code raised. Everything else was done nevertheless.
        """
        self.mark_gradients_used()
        self._engine.watch.phase = "end"
        training = self._training
        training.iteration += 1
        # Not in place: `count_or_undo` keeps the old value, which may be a tensor.
        training.num_applied = training.num_applied + applied
        iterator = training.iterators[MAIN]
        # Not asked for otherwise, because an iterable without a length reads the next batch for it.
        counts_epochs = training.carried is not None or self._counting
        previous_epoch = iterator.epoch if counts_epochs else 0
        late_errors: list[BaseException] = []
        for name, batches in consumed.items():
            try:
                training.iterators[name].advance(batches)
            except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
                late_errors.append(error)
        if counts_epochs and (new_epochs := iterator.epoch - previous_epoch):
            if training.carried is not None:
                training.carried.start_epoch()
            for optimizer in self._counting:
                for _ in range(new_epochs):
                    late_errors += collect_error(partial(optimizer.new_epoch, auto=True))
        return late_errors

    def count_or_undo(self, applied: bool | torch.Tensor, consumed: Mapping[str, int]) -> None:
        """Count an update, or count nothing and raise what user code raised.

        Args:
            applied: Whether the update moved any weights; a tensor where only the device knows.
            consumed: The number of batches to advance by, for each iterator by name.
        """
        training = self._training
        before = {name: training.iterators[name].state_dict() for name in consumed}
        counters = training.iteration, training.num_applied
        try:
            _raise_first(self._count(applied, consumed))
        except BaseException:
            training.iteration, training.num_applied = counters
            for name, state in before.items():
                training.iterators[name].load_state_dict(state)
            raise


def _total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the norm of the gradients of several optimizers, given that of each; None if there is none."""
    if not norms:
        return None
    first, *others = norms
    if not others:
        # The norm itself: the root of its square may be another number.
        return first
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first.device) for norm in norms]))
    return total


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of several exceptions, if there is one."""
    for error in errors:
        raise error
