"""Extensions: what a training run does besides updating.

A parameter named ``trainer`` is a `lockstep.Trainer`. The module of that class imports this one, which
therefore cannot name the type; subclasses can, and should.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from lockstep.arguments import misfit
from lockstep.communicators import Communicator
from lockstep.digest import checksum
from lockstep.errors import DisagreementError, StateError, warn
from lockstep.nest import attributes
from lockstep.state import Stateful, check_keys
from lockstep.triggers import Trigger, TriggerSpec
from lockstep.updaters import UnsavedState

WRITER = 300
"""The priority of extensions that add observed values, and must run before those that read them."""

EDITOR = 200
"""The priority of extensions that change observed values before they are read."""

READER = 100
"""The priority of extensions that only read observed values."""

Action: TypeAlias = Callable[[Any], object]


class Extension(Stateful, ABC):
    """The base class of extensions, which run between updates; a subclass overrides the methods that it needs.

    Attributes:
        trigger: The default trigger, which `Trainer.extend` can override.
        priority: The default priority. The extensions of one iteration run in order of descending priority, and
            in the order in which they were added if priorities are equal; so do `initialize`, `on_error` and
            `finalize`.
        call_before_training: Whether the extension is also called once before the first update.
        acts_together: Whether the ranks of a run act together in it, so that each must have it with the same trigger.
        saves_run: Whether it writes snapshots from which `Trainer.run` can resume. Without such an extension,
            ``run(resume="auto")`` warns.
    """

    trigger: TriggerSpec = (1, "iteration")
    priority: int = READER
    call_before_training: bool = False
    acts_together: bool = False
    saves_run: bool = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: default trigger {self.trigger!r}, default priority {self.priority}>"

    @property
    def name(self) -> str:
        """The default name, which `Trainer.extend` can override."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, trainer: Any) -> None:
        """Run the extension.

        Args:
            trainer: The trainer, between two updates.
        """

    def collect(self, trainer: Any) -> None:
        """Read the observation of every update, whether the trigger fires or not; does nothing by default.

        It is called when it is the extension's turn, before its trigger is called.

        Args:
            trainer: The trainer, between two updates.
        """

    def before_update(self, trainer: Any) -> None:
        """Act before each update, whether the trigger fires or not; does nothing by default.

        It is called again for an update that was interrupted and is run again.

        Args:
            trainer: The trainer, before its next update.
        """

    def prepare(self, trainer: Any) -> None:
        """Read what a loaded state refers to; does nothing by default.

        It is called first, and also for a run that has ended, so it must not write anything.

        Args:
            trainer: The trainer, before its next update.
        """

    def initialize(self, trainer: Any) -> None:
        """Prepare for a run that starts or resumes; does nothing by default.

        Args:
            trainer: The trainer, before its next update.
        """

    def begin(self, trainer: Any) -> None:
        """Begin to write; does nothing by default.

        It is called when every extension is initialized, so that a start that one of them refuses, because another run
        writes to the folder for example, leaves the files that are there unchanged.

        Args:
            trainer: The trainer, before its next update.
        """

    def finalize(self, trainer: Any) -> None:
        """Clean up when a run ends, with or without an error, if `initialize` was called; does nothing by default.

        Args:
            trainer: The trainer, after its last update. Its `error` is the exception that ends the run, or None.
        """

    def on_error(self, trainer: Any, error: BaseException) -> None:
        """React to an exception that ends the run, including Ctrl-C, before `finalize`; does nothing by default.

        Args:
            trainer: The trainer, after its last update.
            error: The exception that ends the run.
        """


class FunctionExtension(Extension):
    """A function of the trainer with the attributes of an extension.

    Args:
        function: The function to call.
        name: The name of the extension; by default that of the function.
        trigger: The trigger that decides when the function is called.
        priority: The priority among the extensions of an iteration.
        call_before_training: Whether the function is also called once before the first update.
        initialize: A function of the trainer that is called when a run starts or resumes.
        finalize: A function of the trainer that is called when a run ends.
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
        # A callable object has no `__name__`.
        default_name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        self._name = name or default_name
        self._has_warned = False
        actions = {"initialize": initialize, "finalize": finalize, "on_error": on_error}
        # They are called instead of the methods, which do nothing.
        vars(self).update({method: action for method, action in actions.items() if action is not None})

    @property
    def name(self) -> str:
        """The name passed to the constructor, or that of the function."""
        return self._name

    def __call__(self, trainer: Any) -> None:
        """Call the function."""
        returned = self.function(trainer)
        if isinstance(returned, Mapping) and not self._has_warned:
            self._has_warned = True
            warn(
                f"Extension {self.name!r} returned values ({', '.join(map(str, returned))}), which are not used. "
                "Call trainer.observe(name, value) for each. This warning is given once."
            )


HOOKS: Final = ("__call__", "collect", "before_update", "prepare", "initialize", "begin", "finalize", "on_error")
"""The methods of an extension that a trainer calls with itself, and the last one with an error, too."""


def as_extension(extension: Extension | Action, **given: Any) -> Extension:
    """Return an extension as it is, and a function of the trainer as an extension with its attributes.

    Args:
        extension: An `Extension`, or a function or another callable. Of its attributes, ``trigger``, ``priority``,
            ``call_before_training``, ``initialize``, ``finalize`` and ``on_error`` are read, if it has them.
        **given: Values for a function that take precedence over its attributes unless they are None.

    Raises:
        TypeError: If it is not callable, or one of its methods cannot be called as a trainer does.

    >>> def greet(trainer): print("epoch", trainer.updater.epoch)
    >>> greet.trigger = (1, "epoch")
    >>> as_extension(greet).trigger
    (1, 'epoch')
    """
    rule = "`extension` must be an Extension or a function of the trainer"
    if isinstance(extension, type):
        raise TypeError(f"{rule}, got the class {extension.__name__}. Create one: {extension.__name__}().")
    if isinstance(extension, Trigger):
        raise TypeError(f"{rule}, got {extension!r}. Pass a trigger as `until` of the Trainer or `trigger` of extend.")
    if not callable(extension):
        remedy = " Call extend for each, or pass extensions= to the Trainer." if isinstance(extension, list) else ""
        raise TypeError(f"{rule}, got {extension!r}.{remedy}")
    made = extension if isinstance(extension, Extension) else _wrapped(extension, rule, given)
    for name in HOOKS:
        parameters = ("trainer", "error") if name == "on_error" else ("trainer",)
        if reason := misfit(getattr(made, name), *parameters):
            take = f"def {name}({', '.join(('self', *parameters))})"
            what = f"got one of {made.name} that cannot: {reason}"
            raise TypeError(f"`{name}` must take the {' and the '.join(parameters)}, {what}. Write it as {take}.")
    unknown = [name for name in dir(type(extension)) if name.startswith("on_") and name not in HOOKS]
    if unknown:
        warn(
            f"No trainer calls {', '.join(unknown)} of {type(extension).__name__}. It calls these methods of an "
            f'extension: {", ".join(HOOKS)}; the first one when the trigger fires, such as (1, "epoch").'
        )
    return made


def _wrapped(function: Action, rule: str, given: Mapping[str, Any]) -> FunctionExtension:
    if reason := misfit(function, None):
        raise TypeError(f"{rule}, got one that cannot be called with the trainer: {reason}.")
    names = ("trigger", "priority", "call_before_training", "initialize", "finalize", "on_error")
    own = {each: getattr(function, each) for each in names if hasattr(function, each)}
    return FunctionExtension(function, **own | {name: each for name, each in given.items() if each is not None})


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
    """Return a decorator that converts a function of the trainer to an extension.

    Args:
        name: The name of the extension; by default that of the function.
        trigger: The trigger that decides when the function is called.
        priority: The priority among the extensions of an iteration.
        call_before_training: Whether the function is also called once before the first update.
        initialize: A function of the trainer that is called when a run starts or resumes.
        finalize: A function of the trainer that is called when a run ends.
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


@dataclass(frozen=True, eq=False)
class ExtensionEntry:
    """An extension of a trainer, with the name, the trigger and the priority it was added with."""

    name: str
    extension: Extension
    trigger: Trigger
    priority: int
    call_before_training: bool


def check_same_on_ranks(communicator: Communicator, entries: Iterable[ExtensionEntry]) -> None:
    """Check that all ranks have the extensions in which they act together, with the same triggers.

    Args:
        communicator: The communicator of the run.
        entries: The extensions in the order in which they are called.

    Raises:
        DisagreementError: If they have not.
    """
    own = []
    for each in entries:
        if each.extension.acts_together:
            kind = type(each.trigger)
            # The text of a trigger of yours may be another one in each process.
            trigger = repr(each.trigger) if kind.__module__.startswith("lockstep.") else kind.__name__
            own.append(f"{each.name} ({type(each.extension).__name__}, trigger {trigger})")
    first, *others = communicator.exchange_json(own)
    for rank, each in enumerate(others, 1):
        if each != first:
            raise DisagreementError(
                "All ranks must have the same extensions in which they act together, with the same triggers, got "
                f"{', '.join(first) or 'none'} on rank 0 and {', '.join(each) or 'none'} on rank {rank}. Add them in "
                "every process, and not under `if trainer.is_main:`; rank 0 writes.",
                rank=rank,
                subject="extensions",
            )


BASES: Final = (Extension, Trigger, Stateful)
"""The classes of lockstep that have no attributes of their own."""


def unsaved_of(entries: Iterable[ExtensionEntry]) -> UnsavedState:
    """Return a comparison of what extensions and triggers of yours remember, where they have no state of their own.

    Args:
        entries: The extensions at the start of a run, after they were initialized.
    """
    parts = [part for each in entries for part in (each.extension, each.trigger)]
    owners = [each.function if isinstance(each, FunctionExtension) else each for each in parts]
    rest = (
        "which begins anew when the run is resumed. Override `state_dict` and `load_state_dict` in a subclass of "
        "lockstep.Extension or lockstep.triggers.Trigger. If it may begin anew, filter this warning."
    )
    return UnsavedState(filter(_has_no_state, owners), _plain_attributes, rest)


def _has_no_state(owner: object) -> bool:
    """Return whether an object of a class of yours has attributes, and neither `state_dict` nor names to save."""
    kind = type(owner)
    # A class of lockstep knows what of its attributes belongs to the state.
    ours = any(base.__module__.startswith("lockstep.") for base in kind.__mro__ if base not in BASES)
    saves = getattr(kind, "state_dict", Stateful.state_dict) is not Stateful.state_dict
    return not (ours or saves or bool(getattr(kind, "_saved", ())) or inspect.isroutine(owner))


def _plain_attributes(owner: object) -> dict[str, str]:
    """Return the numbers and texts in the attributes of an object, and checksums of the tensors, by name."""
    found = attributes(owner)
    plain = {name: repr(value) for name, value in found.items() if type(value) in (bool, int, float, str)}
    return plain | {name: f"{checksum(each.detach())}" for name, each in found.items() if type(each) is torch.Tensor}


def check_extensions(state: Mapping[str, Any], names: Collection[str], *, strict: bool, warns: bool) -> None:
    """Check the extensions that a saved state of a trainer names; warn of those that were added or removed since.

    Args:
        state: The saved state of the trainer. It is not changed.
        names: The names of the trainer's extensions.
        strict: Whether a difference is an error.
        warns: Whether this process prints the warning.

    Raises:
        StateError: If `strict` and extensions were added or removed; or if the state contradicts itself, whether
            strict or not.
    """
    saved = state["extensions"]
    check_keys(state["triggers"], saved, of="the triggers of Trainer")
    unknown = {*state["pending"], state["due"]} - {None, *saved}
    if unknown:
        raise StateError(f"The state of Trainer must name its extensions as pending, got {sorted(unknown)}.")
    if strict:
        check_keys(saved, names, of="the extensions of Trainer")
    added = [name for name in names if name not in saved]
    removed = [name for name in saved if name not in names]
    if warns and (added or removed):
        changes = [f"added {', '.join(added)}"] if added else []
        changes += [f"removed {', '.join(removed)}"] if removed else []
        warn(
            f"The extensions of this Trainer are not those of the saved state: {' and '.join(changes)}. Extensions "
            "that were added start without a saved state, and the state of those that were removed is ignored. To "
            "refuse such a state, call load_state_dict(state, strict=True)."
        )
