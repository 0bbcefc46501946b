"""The last stage of an update, and the only one that changes the training state: step, replace the buffers, count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.replicas import ThreadSettings, apply_tensor_hooks, combine_buffers
from lockstep.strides import laid_out_for
from lockstep.updaters.attempt import Attempt, Deferral
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.setup import MAIN, Names
from lockstep.updaters.state import Training
from lockstep.updaters.step.engine import GradientEngine
from lockstep.updaters.step.optimizer_step import OptimizerStep


class Committer:
    """Commits attempts.

    Args:
        engine: The gradient engine that made the attempts.
        training: The training state.
        deferral: Decides whether a deferred check is read after all.
        auto_new_epoch: Whether to notify optimizers that count epochs.
    """

    def __init__(self, engine: GradientEngine, training: Training, deferral: Deferral, *, auto_new_epoch: bool) -> None:
        self._deferral = deferral
        self._engine = engine
        self._training = training
        self._steps = {
            name: OptimizerStep(each, training.masters.get(name)) for name, each in training.optimizers.items()
        }
        self._epoch_listeners = EpochListeners(training.optimizers if auto_new_epoch else {}, training.epoch_schedulers)

    def assign_gradients(self, attempt: Attempt) -> None:
        """Store the gradients of an attempt where optimizers read them.

        Tensor hooks that the user registered on a parameter run once, as they would in a hand-written loop.
        """
        masters = self._training.masters
        # The user may have written to weights between updates. Master weights must follow before the step.
        for each in masters.values():
            each.refresh()
        layout, wanted = self._engine.layout, attempt.request.wanted
        for parameter in layout.frozen:
            # A parameter that has been frozen since still has the gradient of its last update, by which an optimizer
            # would move it.
            parameter.grad = None
        for parameter, gradient in zip(layout.parameters, attempt.gradients, strict=True):
            if wanted is not None and id(parameter) not in wanted:
                continue
            if gradient is not None and parameter._backward_hooks:
                gradient = apply_tensor_hooks(parameter, gradient)  # noqa: PLW2901 - a hook may replace it
            target = self._gradient_target(parameter) if masters else parameter
            # A half-precision parameter that belongs to no optimizer has no master weight, and gets its float32
            # gradient converted.
            if gradient is not None:
                gradient = gradient.to(target.dtype)  # noqa: PLW2901 - replaces it
                if gradient.layout is torch.strided and gradient.stride() != target.stride():
                    # Gradients from other ranks or from a hook may have other strides than the weight, which fused
                    # kernels ignore.
                    gradient = laid_out_for(target, gradient)  # noqa: PLW2901 - see above
            target.grad = gradient
        attempt.gradients_assigned = True

    def _gradient_target(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter or master weight whose ``grad`` an optimizer reads."""
        for masters in self._training.masters.values():
            parameter = masters.receiver(parameter)
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
        if not attempt.gradients_assigned:
            self.assign_gradients(attempt)
        # A hook or a scheduler that the user has added since the first stage may need the check on the host.
        if attempt.check.flag is not None:
            attempt.check = self._deferral.read_if_needed(attempt.check, names)
        if len(names) > 1:
            return self._commit_several(names, attempt, settings, consumed)
        applied = attempt.applied
        late_errors = [] if applied is False else self._apply(names, attempt, settings)
        late_errors += self._count(applied, consumed)
        # Before errors of user code are raised: the update counts as done, and its scale must not be lost.
        self._training.scale = attempt.next_scale(self._training.scale)
        for error in late_errors:
            raise error
        return attempt.result(applied=applied)

    def _commit_several(
        self, names: Names, attempt: Attempt, settings: ThreadSettings, consumed: Mapping[str, int]
    ) -> UpdateResult:
        """Step several optimizers: all of them, or none if an exception is raised."""
        # One optimizer cannot take its step back, so the state is copied first. A single optimizer saves this copy.
        savepoint, applied = self._training.save(), attempt.applied
        try:
            _raise_first([] if applied is False else self._apply(names, attempt, settings))
            self.count_or_undo(applied, consumed)
        except BaseException:
            savepoint.restore()
            raise
        self._training.scale = attempt.next_scale(self._training.scale)
        return attempt.result(applied=applied)

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
        if attempt.check.flag is not None:
            attempt.check = self._deferral.read_if_needed(attempt.check, names)
        applied = attempt.applied
        if applied is not False:
            _raise_first(self._apply(names, attempt, settings))
        self._training.scale = attempt.next_scale(self._training.scale)
        return applied

    def _apply(self, names: Names, attempt: Attempt, settings: ThreadSettings) -> list[BaseException]:
        """Step the optimizers, then store the new buffers in the model.

        Returns:
            The errors that user code raised after the weights had moved. The step is complete nevertheless.

        Raises:
            BaseException: An error that was raised before the first weight moved, or in the middle of the step.
        """
        engine, flag = self._engine, attempt.check.flag
        engine.watch.doing = "optimizer"
        layout, replicas = engine.layout, engine.replicas
        num_devices = len(replicas.devices) if layout.tree_sum.side_by_side else 1
        run = partial(replicas.run, settings=settings)
        late_errors: list[BaseException] = []
        for name in names:
            error = self._steps[name].step(num_devices=num_devices, run=run, unless=flag)
            if error is not None:
                late_errors.append(error)
        # After the steps: an error before the weights move must leave the buffers as they are, too.
        if layout.buffer_refs:
            combine_buffers(attempt.buffers, layout.buffer_refs, weight=attempt.samples, unless=flag)
        for scheduler in self._training.schedulers.values():
            if any(scheduler.optimizer is self._training.optimizers[name] for name in names):
                late_errors += collect_error(scheduler.step)
        return late_errors

    def _count(self, applied: bool | torch.Tensor, consumed: Mapping[str, int]) -> list[BaseException]:
        """Count the update, advance its iterators, and begin the epochs that follow.

        Returns:
            The errors that user code raised. Everything else was done nevertheless.
        """
        self._engine.watch.doing = "end"
        training = self._training
        training.iteration += 1
        # Not in place: `count_or_undo` keeps the old value, which may be a tensor.
        training.applied = training.applied + applied
        iterator = training.iterators[MAIN]
        previous_epoch = iterator.epoch
        late_errors: list[BaseException] = []
        for name, batches in consumed.items():
            try:
                training.iterators[name].advance(batches)
            except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
                late_errors.append(error)
        new_epochs = iterator.epoch - previous_epoch
        return late_errors + self._epoch_listeners.notify(new_epochs) if new_epochs else late_errors

    def count_or_undo(self, applied: bool | torch.Tensor, consumed: Mapping[str, int]) -> None:
        """Count an update, or count nothing and raise what user code raised.

        Args:
            applied: Whether the update moved any weights; a tensor where only the device knows.
            consumed: The number of batches to advance by, for each iterator by name.
        """
        training = self._training
        before = {name: training.iterators[name].state_dict() for name in consumed}
        counters = training.iteration, training.applied
        try:
            _raise_first(self._count(applied, consumed))
        except BaseException:
            training.iteration, training.applied = counters
            for name, state in before.items():
                training.iterators[name].load_state_dict(state)
            raise


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of several exceptions, if there is one."""
    for error in errors:
        raise error


@runtime_checkable
class CountsEpochs(Protocol):
    """An optimizer that counts epochs, as those of lockstep do.

    Attributes:
        use_auto_new_epoch: Set by an updater that calls `new_epoch`, so that no other caller does.
    """

    use_auto_new_epoch: bool

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch.

        Args:
            auto: Whether an updater is calling.
        """


class EpochListeners:
    """The optimizers and schedulers that are notified when an epoch begins.

    Args:
        optimizers: The optimizers by name. Those that count epochs are notified, from now on only by this object.
        schedulers: The schedulers to step.
    """

    def __init__(self, optimizers: Mapping[str, object], schedulers: Mapping[str, LRScheduler]) -> None:
        counting = [each for each in optimizers.values() if isinstance(each, CountsEpochs)]
        for optimizer in counting:
            optimizer.use_auto_new_epoch = True
        self._calls: list[Callable[[], object]] = [partial(optimizer.new_epoch, auto=True) for optimizer in counting]
        self._calls += [scheduler.step for scheduler in schedulers.values()]

    def notify(self, epochs: int) -> list[BaseException]:
        """Notify all listeners of new epochs.

        Args:
            epochs: The number of epochs that have begun.

        Returns:
            The errors that they raised. All listeners have been called nevertheless.
        """
        return [error for _ in range(epochs) for call in self._calls for error in collect_error(call)]


def collect_error(call: Callable[[], object]) -> list[BaseException]:
    """Call a function of the user; return what it raised, if anything, so that the caller can raise it later."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
        return [error]
    return []
