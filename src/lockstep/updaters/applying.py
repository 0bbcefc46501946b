"""Move the weights by a gradient, and count: the part of an update that changes something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from lockstep.precision import why_it_waits
from lockstep.replicas.buffers import combine
from lockstep.replicas.settings import ThreadSettings
from lockstep.updaters.attempt import Attempt
from lockstep.updaters.commit import Committer
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.epochs import Epochs
from lockstep.updaters.handover import hand_over
from lockstep.updaters.late import raised
from lockstep.updaters.names import Names
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.training import Training
from lockstep.updaters.tries import AnyTry, UnreadTry


class Applier:
    """Applies what was tried.

    Args:
        engine: Made the gradients.
        training: What they move.
        auto_new_epoch: Whether optimizers that count epochs are told of them.
    """

    def __init__(self, engine: GradientEngine, training: Training, *, auto_new_epoch: bool) -> None:
        self._engine = engine
        self._training = training
        self._committers = {
            name: Committer(each, training.masters.get(name)) for name, each in training.optimizers.items()
        }
        self._epochs = Epochs(training.optimizers if auto_new_epoch else {}, training.epoch_schedulers)

    def hand_over(self, attempt: Attempt, wanted: frozenset[int] | None) -> None:
        """Put a gradient where the optimizers it is for look for it."""
        for masters in self._training.masters.values():
            masters.refresh()
        layout, gradients = self._engine.layout, attempt.gradients
        parameters = layout.parameters
        if wanted is not None:
            chosen = [index for index, parameter in enumerate(parameters) if id(parameter) in wanted]
            parameters = [parameters[index] for index in chosen]
            gradients = [gradients[index] for index in chosen]
        hand_over(parameters, gradients, frozen=layout.frozen, receiver=self._receiver)

    def _receiver(self, parameter: nn.Parameter) -> nn.Parameter:
        """Say whose ``grad`` optimizers read in the place of a parameter's."""
        for masters in self._training.masters.values():
            parameter = masters.receiver(parameter)
        return parameter

    def commit(
        self, names: Names, tried: AnyTry, settings: ThreadSettings, *, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights if there is a finite gradient to move them by; count in any case.

        With one optimizer there is no going back once it has stepped, and no need to: what fails afterwards
        is raised when the update is complete. Several go back to where they were.

        Args:
            names: The optimizers that step.
            tried: What they step by.
            settings: What the calling thread computes under.
            drawn: How many batches to move past, by the iterator's name.
        """
        if isinstance(tried, UnreadTry) and self.why_it_waits(names) is not None:
            tried = tried.read()
        if len(names) > 1:
            return self._commit_several(names, tried, settings, drawn)
        movable = tried.movable
        late = self._apply(names, tried, settings) if movable else []
        late += self._count(movable, drawn, tried.flag)
        tried.move(self._training.scale)
        _raise_first(late)
        return tried.result(applied=movable)

    def _commit_several(
        self, names: Names, tried: AnyTry, settings: ThreadSettings, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights of several optimizers: of all, or after an exception of none."""
        savepoint = self._training.save()
        try:
            _raise_first(self._apply(names, tried, settings) if tried.movable else [])
            self.count_or_undo(tried.movable, drawn, tried.flag)
        except BaseException:
            savepoint.restore()
            raise
        tried.move(self._training.scale)
        return tried.result(applied=tried.movable)

    def step(self, names: Names, tried: AnyTry, settings: ThreadSettings) -> AnyTry:
        """Move the weights without counting, and raise at once what user code raises.

        Whoever calls this puts everything back after an exception.

        Returns:
            What was tried, as far as it has been read by now.
        """
        if isinstance(tried, UnreadTry) and self.why_it_waits(names) is not None:
            tried = tried.read()
        if tried.movable:
            _raise_first(self._apply(names, tried, settings))
        tried.move(self._training.scale)
        return tried

    def _apply(self, names: Names, tried: AnyTry, settings: ThreadSettings) -> list[BaseException]:
        """Step, then make the new buffers state.

        Returns:
            What was raised by user code once weights had moved; it is over all the same.

        Raises:
            BaseException: What was raised before the first weight moved, or in the middle.
        """
        self._engine.phase("optimizer")
        places = len(self._engine.group.devices) if self._engine.layout.side_by_side else 1
        run = partial(self._engine.group.run, settings=settings)
        late: list[BaseException] = []
        for name in names:
            error = self._committers[name].step(places=places, run=run, unless=tried.flag)
            if error is not None:
                late.append(error)
        if self._engine.layout.slots:
            attempt = tried.attempt
            combine(attempt.buffers, self._engine.layout.slots, weight=attempt.samples, unless=tried.flag)
        for scheduler in self._training.schedulers.values():
            if any(scheduler.optimizer is self._training.optimizers[name] for name in names):
                late += raised(scheduler.step)
        return late

    def _count(
        self, applied: bool, drawn: Mapping[str, int], unless: torch.Tensor | None = None
    ) -> list[BaseException]:
        """Count the update, move past its batches, begin the epochs that follow them.

        Returns:
            What user code raised on the way; the rest was done all the same.
        """
        self._engine.phase("end")
        training = self._training
        training.iteration += 1
        if applied:
            training.applied = training.applied.one_more(unless=unless)
        before = training.iterator.epoch
        late: list[BaseException] = []
        for name, batches in drawn.items():
            late += raised(partial(training.iterators[name].advance, batches))
        return late + self._epochs.begin(training.iterator.epoch - before)

    def count_or_undo(
        self, applied: bool, drawn: Mapping[str, int], unless: torch.Tensor | None = None
    ) -> None:
        """Count an update, or raise what user code raised and count nothing.

        Args:
            applied: Whether it moved any weights.
            drawn: How many batches to move past, by the iterator's name.
            unless: 0-d, on a device; above 0 where it moved none after all.
        """
        training = self._training
        before = {name: training.iterators[name].state_dict() for name in drawn}
        counters = training.iteration, training.applied
        try:
            _raise_first(self._count(applied, drawn, unless))
        except BaseException:
            training.iteration, training.applied = counters
            for name, state in before.items():
                training.iterators[name].load_state_dict(state)
            raise

    def why_it_waits(self, names: Names) -> str | None:
        """Say why the step of these optimizers has to wait for the verdict on their gradient; None if not."""
        training = self._training
        for name in names:
            optimizer = training.optimizers[name]
            why = why_it_waits(optimizer, training.masters.get(name))
            if why is not None:
                return why
            if any(scheduler.optimizer is optimizer for scheduler in training.schedulers.values()):
                return "a scheduler that counts applied updates counts on the host"
        return None


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of some exceptions, if there is one."""
    for error in errors:
        raise error
