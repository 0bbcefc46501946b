"""Attach handlers, metrics and loggers of PyTorch-Ignite to a trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from lockstep.data import BatchIterator
from lockstep.errors import OrderError
from lockstep.extensions.loggers import check_installed, import_optional
from lockstep.integers import check_integer
from lockstep.metrics import Mean, Observed, as_mean
from lockstep.state import check_keys
from lockstep.trainer import EDITOR, Extension, Trainer
from lockstep.triggers import Until


class HasState(Protocol):
    """An object that is saved with a run, such as a handler or a model."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Load a saved state."""


class IgniteBridge(Extension):
    """Fires the events of an Ignite `Engine` during a run, so that what is attached to that engine works here.

    The engine never runs itself. For each update, the bridge sets ``engine.state`` and fires the events in Ignite's
    order: ``STARTED`` when a run starts or resumes, ``EPOCH_STARTED``, ``ITERATION_STARTED`` before and
    ``ITERATION_COMPLETED`` after each update, ``EPOCH_COMPLETED``, and ``COMPLETED`` or ``EXCEPTION_RAISED`` at the
    end. Filters such as ``ITERATION_COMPLETED(every=10)`` work. ``engine.terminate()`` ends the run after that
    iteration.

    In ``engine.state``, ``iteration`` counts updates and ``epoch`` the current epoch, both from 1. ``output`` is a dict
    with the values of the update, such as ``output["loss"]``, and ``metrics`` has all observed values by their full
    names, such as ``"validation/main/accuracy"``. Values that are on a device are 0-d tensors. ``epoch_length``,
    ``max_epochs`` and ``max_iters`` are set as far as they are known, and ``batch`` is None. What metrics of Ignite
    write to ``metrics`` is observed by the trainer, and so logged.

    The extension must be called after every update, which is its default trigger. With several processes, the events
    are fired on each of them, with equal numbers: attach what prints or writes on rank 0 only (``trainer.is_main``).

    Args:
        output: A function of the trainer that returns ``engine.state.output`` after an update; by default the dict
            described above.
        saved: Objects by name whose states are saved with the run, such as the model of an ``EMAHandler``.
        epoch_length: The number of updates of an epoch, at least 1. By default it is computed for a `BatchIterator`
            whose batches are not accumulated, and otherwise known from the end of the first epoch on.

    Attributes:
        engine: The engine, to which you attach handlers.

    Raises:
        ImportError: If Ignite is not installed.
        TypeError: If `epoch_length` is not an integer.
        ValueError: If it is less than 1.

    Example::

        bridge = lockstep.extensions.IgniteBridge()
        ignite.handlers.ProgressBar().attach(bridge.engine, output_transform=lambda output: {"loss": output["loss"]})
        trainer.extend(bridge)
    """

    # After extensions that observe values, and before those that read them.
    priority = EDITOR

    def __init__(
        self,
        *,
        output: Callable[[Trainer], object] | None = None,
        saved: Mapping[str, HasState] | None = None,
        epoch_length: int | None = None,
    ) -> None:
        check_installed("ignite", extra="ignite", user="IgniteBridge")
        if epoch_length is not None:
            check_integer("epoch_length", epoch_length, minimum=1)
        ignite = import_optional("ignite.engine")
        self.engine: Any = ignite.Engine(_refuse)
        self.engine.state.metrics = self._metrics = _Metrics()
        self.output = output
        self.saved = dict(saved or {})
        self.epoch_length = epoch_length
        self._events = ignite.Events
        self._announced: int | None = None
        """The iteration whose start has been announced."""
        self._epoch: int | None = None
        """The epoch whose start has been announced; None before the first update of a run."""
        self._epoch_iteration = 0
        self._ended_by_error = False
        self._began = [0.0, 0.0]
        """When the run and the epoch began, in seconds."""

    def initialize(self, trainer: Trainer) -> None:
        """Describe the run, and fire ``STARTED``."""
        state, updater, until = self.engine.state, trainer.updater, trainer.until
        state.iteration, state.epoch = updater.iteration, updater.epoch
        if isinstance(until, Until):
            state.max_epochs = math.ceil(until.bound) if until.unit == "epoch" else None
            state.max_iters = math.ceil(until.bound) if until.unit in ("iteration", "update") else None
        state.epoch_length = self.epoch_length or _epoch_length(trainer) or state.epoch_length
        self._announced = self._epoch = None
        self._ended_by_error = False
        self._began = [time.perf_counter()] * 2
        self.engine.should_terminate = False
        self._fire(self._events.STARTED)
        if self.engine.should_terminate:
            trainer.stop()

    def before_update(self, trainer: Trainer) -> None:
        """Fire ``EPOCH_STARTED`` at the beginning of an epoch, and ``ITERATION_STARTED``."""
        state, updater = self.engine.state, trainer.updater
        # An update that was interrupted is announced once for each run.
        if updater.iteration == self._announced:
            return
        if updater.epoch != self._epoch:
            self._epoch, self._began[1] = updater.epoch, time.perf_counter()
            state.epoch = updater.epoch + 1
            self._fire(self._events.EPOCH_STARTED)
        self._announced = updater.iteration
        state.iteration = updater.iteration + 1
        self._fire(self._events.ITERATION_STARTED)

    def __call__(self, trainer: Trainer) -> None:
        """Fire ``ITERATION_COMPLETED`` and, at the end of an epoch, ``EPOCH_COMPLETED``."""
        state, updater = self.engine.state, trainer.updater
        # From the trainer, because a run that resumes here did not call `before_update`.
        state.iteration = updater.iteration
        # First, because it may observe values.
        output = None if self.output is None else self.output(trainer)
        values = {name: _as_value(value) for name, value in trainer.observation.items()}
        own = {name.removeprefix("main/"): value for name, value in values.items() if name.startswith("main/")}
        state.output = own if self.output is None else output
        self._metrics.written.clear()
        # By `dict.update`, which does not count as written by a metric.
        self._metrics.update(values)
        self._fire(self._events.ITERATION_COMPLETED)
        if updater.is_new_epoch:
            if self._epoch is not None and updater.epoch == self._epoch + 1 and state.epoch_length is None:
                state.epoch_length = updater.iteration - self._epoch_iteration
            self._epoch_iteration = updater.iteration
            state.epoch = updater.epoch
            state.times[self._events.EPOCH_COMPLETED.name] = time.perf_counter() - self._began[1]
            self._fire(self._events.EPOCH_COMPLETED)
        for name in self._metrics.written:
            if _is_observable(self._metrics[name]):
                trainer.observe(name, self._metrics[name])
        if self.engine.should_terminate:
            trainer.stop()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002 - of the interface
        """Fire ``EXCEPTION_RAISED``."""
        self._ended_by_error = True
        # Not by `_fire`, which passes no arguments.
        self.engine._fire_event(self._events.EXCEPTION_RAISED, error)  # noqa: SLF001 - no other way

    def finalize(self, trainer: Trainer) -> None:  # noqa: ARG002 - of the interface
        """Fire ``COMPLETED``, unless an exception ends the run."""
        if self._ended_by_error:
            return
        self.engine.state.times[self._events.COMPLETED.name] = time.perf_counter() - self._began[0]
        terminates = self.engine.should_terminate
        if terminates:
            self._fire(self._events.TERMINATE)
        if terminates != "skip_completed":
            self._fire(self._events.COMPLETED)

    def state_dict(self) -> dict[str, object]:
        """Return the states of the objects to save, and the values that ``engine.state_dict_user_keys`` names."""
        return {
            "saved": {name: dict(each.state_dict()) for name, each in self.saved.items()},
            "engine": {name: getattr(self.engine.state, name) for name in self.engine.state_dict_user_keys},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: If a key is missing or unknown; nothing has changed then.
        """
        check_keys(state, ("saved", "engine"), of="IgniteBridge")
        check_keys(state["saved"], self.saved, of="the saved objects of IgniteBridge")
        for name, each in self.saved.items():
            each.load_state_dict(state["saved"][name])
        for name, value in state["engine"].items():
            setattr(self.engine.state, name, value)

    def _fire(self, event: Any) -> None:
        """Call the handlers of an event.

        Raises:
            OrderError: If a handler asked for what a trainer does not do.
        """
        engine = self.engine
        engine.fire_event(event)
        if engine.should_terminate_single_epoch or engine.should_interrupt:
            engine.should_terminate_single_epoch = engine.should_interrupt = False
            raise OrderError(
                "`engine.terminate_epoch` and `engine.interrupt` must not be called by handlers of an IgniteBridge, "
                "because every update uses the next batch. Call `engine.terminate` to end the run."
            )


class _Metrics(dict[str, Any]):
    """The metrics of an engine, and the names of those that were written by metrics of Ignite."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, None] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.written[name] = None


def _refuse(engine: Any, batch: object) -> None:  # noqa: ARG001 - of the interface
    """Refuse to run the engine."""
    raise OrderError("`engine.run` must not be called for the engine of an IgniteBridge. Call `Trainer.run` instead.")


def _epoch_length(trainer: Trainer) -> int | None:
    """Return the number of updates of an epoch, if it is a whole number that can be computed."""
    iterator = trainer.updater.get_iterator("main")
    if not isinstance(iterator, BatchIterator) or trainer.updater.recipe_fields().get("accumulate", 1) != 1:
        return None
    # With last_batch="wrap", the number of batches differs from epoch to epoch.
    whole, rest = divmod(len(iterator.dataset), iterator.batch_size)
    if rest and iterator.last_batch == "wrap":
        return None
    return whole + (rest > 0 and iterator.last_batch == "short")


def _as_value(value: Observed) -> float | torch.Tensor:
    """Return an observed value as a number, or as a 0-d tensor if it is on a device, for which nothing waits."""
    mean = as_mean(value)
    if isinstance(mean.total, torch.Tensor) and mean.total.device.type != "cpu":
        return mean.total / mean.weight
    return float(mean)


def _is_observable(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float | Mean) and not isinstance(value, bool)
