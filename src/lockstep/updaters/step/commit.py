"""The last stage of an update, and the only one that changes the training state: step, take over buffers, count."""

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
        engine: Made them.
        training: What they move.
        deferral: Says whether a check that was left on the device is read after all.
        auto_new_epoch: Whether optimizers that count epochs are told of them.
    """

    def __init__(self, engine: GradientEngine, training: Training, deferral: Deferral, *, auto_new_epoch: bool) -> None:
        self._deferral = deferral
        self._engine = engine
        self._training = training
        self._steps = {
            name: OptimizerStep(each, training.masters.get(name)) for name, each in training.optimizers.items()
        }
        self._epochs = Epochs(training.optimizers if auto_new_epoch else {}, training.epoch_schedulers)

    def hand_over(self, attempt: Attempt) -> None:
        """Put a gradient where the optimizers it is for look for it.

        Hooks that the user registered on a parameter see it once, as they would in a loop of one's own.
        """
        masters = self._training.masters
        for each in masters.values():
            each.refresh()
        layout, wanted = self._engine.layout, attempt.request.wanted
        for parameter in layout.frozen:
            # One that required a gradient before has that of its last update, by which an optimizer would
            # move it.
            parameter.grad = None
        for parameter, gradient in zip(layout.parameters, attempt.gradients, strict=True):
            if wanted is not None and id(parameter) not in wanted:
                continue
            if gradient is not None and parameter._backward_hooks:
                gradient = apply_tensor_hooks(parameter, gradient)  # noqa: PLW2901 - a hook's answer stands in for it
            target = self._receiver(parameter) if masters else parameter
            # A half-precision parameter without a master is nobody's; its gradient comes in float32 all the
            # same.
            if gradient is not None:
                gradient = gradient.to(target.dtype)  # noqa: PLW2901 - stands in for it
                if gradient.layout is torch.strided and gradient.stride() != target.stride():
                    # What came from other ranks or out of a hook may lie otherwise than the weight, which fused
                    # kernels do not notice.
                    gradient = laid_out_for(target, gradient)  # noqa: PLW2901 - see above
            target.grad = gradient
        attempt.handed_over = True

    def _receiver(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return whose ``grad`` optimizers read in the place of a parameter's."""
        for masters in self._training.masters.values():
            parameter = masters.receiver(parameter)
        return parameter

    def commit(
        self, names: Names, attempt: Attempt, settings: ThreadSettings, *, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights if there is a finite gradient to move them by; count in any case.

        With one optimizer there is no going back once it has stepped, and no need to: what fails afterwards
        is raised when the update is complete. Several go back to where they were.

        Args:
            names: The optimizers that step.
            attempt: What they step by.
            settings: What the calling thread computes under.
            drawn: How many batches to move past, by the iterator's name.
        """
        if not attempt.handed_over:
            self.hand_over(attempt)
        if attempt.check.flag is not None:
            attempt.check = self._deferral.read_if_needed(attempt.check, names)
        if len(names) > 1:
            return self._commit_several(names, attempt, settings, drawn)
        applied = attempt.applied
        late = [] if applied is False else self._apply(names, attempt, settings)
        late += self._count(applied, drawn)
        self._training.scale = attempt.following(self._training.scale)
        for error in late:
            raise error
        return attempt.result(applied=applied)

    def _commit_several(
        self, names: Names, attempt: Attempt, settings: ThreadSettings, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights of several optimizers: of all, or after an exception of none."""
        savepoint, applied = self._training.save(), attempt.applied
        try:
            _raise_first([] if applied is False else self._apply(names, attempt, settings))
            self.count_or_undo(applied, drawn)
        except BaseException:
            savepoint.restore()
            raise
        self._training.scale = attempt.following(self._training.scale)
        return attempt.result(applied=applied)

    def step(self, names: Names, attempt: Attempt, settings: ThreadSettings) -> bool | torch.Tensor:
        """Move the weights without counting, and raise at once what user code raises.

        Whoever calls this puts everything back after an exception.

        Returns:
            Whether weights have moved; a tensor where only the device knows.
        """
        if attempt.check.flag is not None:
            attempt.check = self._deferral.read_if_needed(attempt.check, names)
        applied = attempt.applied
        if applied is not False:
            _raise_first(self._apply(names, attempt, settings))
        self._training.scale = attempt.following(self._training.scale)
        return applied

    def _apply(self, names: Names, attempt: Attempt, settings: ThreadSettings) -> list[BaseException]:
        """Step, then make the new buffers state.

        Returns:
            What was raised by user code once weights had moved; it is over all the same.

        Raises:
            BaseException: What was raised before the first weight moved, or in the middle.
        """
        engine, flag = self._engine, attempt.check.flag
        engine.watch.doing = "optimizer"
        layout, replicas = engine.layout, engine.group
        places = len(replicas.devices) if layout.tree_sum.side_by_side else 1
        run = partial(replicas.run, settings=settings)
        late: list[BaseException] = []
        for name in names:
            error = self._steps[name].step(places=places, run=run, unless=flag)
            if error is not None:
                late.append(error)
        if layout.slots:
            combine_buffers(attempt.buffers, layout.slots, weight=attempt.samples, unless=flag)
        for scheduler in self._training.schedulers.values():
            if any(scheduler.optimizer is self._training.optimizers[name] for name in names):
                late += raised(scheduler.step)
        return late

    def _count(self, applied: bool | torch.Tensor, drawn: Mapping[str, int]) -> list[BaseException]:
        """Count the update, move past its batches, begin the epochs that follow them.

        Returns:
            What user code raised on the way; the rest was done all the same.
        """
        self._engine.watch.doing = "end"
        training = self._training
        training.iteration += 1
        training.applied = training.applied + applied
        iterator = training.iterators[MAIN]
        before = iterator.epoch
        late: list[BaseException] = []
        for name, batches in drawn.items():
            try:
                training.iterators[name].advance(batches)
            except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
                late.append(error)
        begun = iterator.epoch - before
        return late + self._epochs.begin(begun) if begun else late

    def count_or_undo(self, applied: bool | torch.Tensor, drawn: Mapping[str, int]) -> None:
        """Count an update, or raise what user code raised and count nothing.

        Args:
            applied: Whether it moved any weights; a tensor where only the device knows.
            drawn: How many batches to move past, by the iterator's name.
        """
        training = self._training
        before = {name: training.iterators[name].state_dict() for name in drawn}
        counters = training.iteration, training.applied
        try:
            _raise_first(self._count(applied, drawn))
        except BaseException:
            training.iteration, training.applied = counters
            for name, state in before.items():
                training.iterators[name].load_state_dict(state)
            raise


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of some exceptions, if there is one."""
    for error in errors:
        raise error


@runtime_checkable
class CountsEpochs(Protocol):
    """An optimizer that wants to know of epochs, as lockstep's own do.

    Attributes:
        use_auto_new_epoch: Set by an updater that calls `new_epoch`, so that nobody else does.
    """

    use_auto_new_epoch: bool

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch; ``auto`` says that an updater calls."""


class Epochs:
    """Those who are told when an epoch begins.

    Args:
        optimizers: Those of them that count epochs are told, and from now on by nobody else.
        schedulers: Stepped.
    """

    def __init__(self, optimizers: Mapping[str, object], schedulers: Mapping[str, LRScheduler]) -> None:
        counting = [each for each in optimizers.values() if isinstance(each, CountsEpochs)]
        for optimizer in counting:
            optimizer.use_auto_new_epoch = True
        self._calls: list[Callable[[], object]] = [partial(optimizer.new_epoch, auto=True) for optimizer in counting]
        self._calls += [scheduler.step for scheduler in schedulers.values()]

    def begin(self, epochs: int) -> list[BaseException]:
        """Tell all of them of so many epochs.

        Returns:
            What they raised; all have been called all the same.
        """
        return [error for _ in range(epochs) for call in self._calls for error in raised(call)]


def raised(call: Callable[[], object]) -> list[BaseException]:
    """Call a function of the user's; return what it raised, if anything, for the caller to raise later."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
        return [error]
    return []
