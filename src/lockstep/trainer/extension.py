"""What a training run does besides updating, one subject at a time.

Where a function here takes ``trainer``, that is a `lockstep.Trainer`. Its module builds on this
one, which therefore cannot name the type; subclasses can, and should.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from lockstep.state import Stateful
from lockstep.triggers import TriggerSpec

WRITER = 300
"""The priority of what adds to the observation, and so must run before those that look at it."""

EDITOR = 200
"""The priority of what changes observed values before they are read."""

READER = 100
"""The priority of what only looks."""

Action: TypeAlias = Callable[[Any], object]


class Extension(Stateful, ABC):
    """Something done between updates; a subclass shows only what differs from doing nothing.

    Attributes:
        trigger: When it is called, unless `Trainer.extend` is told otherwise.
        priority: Extensions of one iteration run by descending priority, equal ones in the order
            they were added; likewise `initialize`, `on_error` and `finalize`.
        call_before_training: Whether it is also called once before the first update.
    """

    trigger: TriggerSpec = (1, "iteration")
    priority: int = READER
    call_before_training: bool = False

    @property
    def name(self) -> str:
        """What it is called, unless `Trainer.extend` is told otherwise."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, trainer: Any) -> None:
        """Do it.

        Args:
            trainer: The run, between two updates.
        """

    def collect(self, trainer: Any) -> None:
        """Look at the observation of every update, whatever the trigger; nothing by default.

        It comes when the extension's turn has come, before its trigger is asked.
        """

    def initialize(self, trainer: Any) -> None:
        """Get ready, whenever a run begins or goes on; nothing by default."""

    def finalize(self, trainer: Any) -> None:
        """Clean up, whenever a run ends, well or not, if `initialize` was called; nothing by default."""

    def on_error(self, trainer: Any, error: BaseException) -> None:
        """React to an exception that ends the run, Ctrl-C included, before `finalize`; nothing by default."""


class FunctionExtension(Extension):
    """A function of the trainer, with the attributes of an extension.

    Args:
        function: What is done.
        name: Its name; the function's own unless given.
        trigger: When it is called.
        priority: Its place among the others.
        call_before_training: Whether it is also called once before the first update.
        initialize: A function of the trainer, called whenever a run begins or goes on.
        finalize: A function of the trainer, called whenever a run ends.
        on_error: A function of the trainer and the exception that ends the run.
    """

    def __init__(
        self,
        function: Action,
        *,
        name: str | None = None,
        trigger: TriggerSpec = (1, "iteration"),
        priority: int = READER,
        call_before_training: bool = False,
        initialize: Action | None = None,
        finalize: Action | None = None,
        on_error: Callable[[Any, BaseException], object] | None = None,
    ) -> None:
        self.function = function
        self.trigger = trigger
        self.priority = priority
        self.call_before_training = call_before_training
        own = function.__name__ if inspect.isroutine(function) else type(function).__name__
        self._name = name or own
        self._initialize = initialize
        self._finalize = finalize
        self._on_error = on_error

    @property
    def name(self) -> str:
        """The name given, or the function's own."""
        return self._name

    def __call__(self, trainer: Any) -> None:
        """Call the function."""
        self.function(trainer)

    def initialize(self, trainer: Any) -> None:
        """Call the function given for it, if any."""
        if self._initialize is not None:
            self._initialize(trainer)

    def finalize(self, trainer: Any) -> None:
        """Call the function given for it, if any."""
        if self._finalize is not None:
            self._finalize(trainer)

    def on_error(self, trainer: Any, error: BaseException) -> None:
        """Call the function given for it, if any."""
        if self._on_error is not None:
            self._on_error(trainer, error)


def make_extension(
    *,
    name: str | None = None,
    trigger: TriggerSpec = (1, "iteration"),
    priority: int = READER,
    call_before_training: bool = False,
    initialize: Action | None = None,
    finalize: Action | None = None,
    on_error: Callable[[Any, BaseException], object] | None = None,
) -> Callable[[Action], FunctionExtension]:
    """Return a decorator that makes a function of the trainer an extension.

    Args:
        name: Its name; the function's own unless given.
        trigger: When it is called.
        priority: Its place among the others.
        call_before_training: Whether it is also called once before the first update.
        initialize: A function of the trainer, called whenever a run begins or goes on.
        finalize: A function of the trainer, called whenever a run ends.
        on_error: A function of the trainer and the exception that ends the run.

    >>> @make_extension(trigger=(1, "epoch"), priority=READER)
    ... def greet(trainer):
    ...     print("epoch", trainer.updater.epoch)
    >>> greet.name, greet.trigger
    ('greet', (1, 'epoch'))
    """
    return partial(
        FunctionExtension,
        name=name,
        trigger=trigger,
        priority=priority,
        call_before_training=call_before_training,
        initialize=initialize,
        finalize=finalize,
        on_error=on_error,
    )
