"""The training loop, which runs updates and extensions until a bound is reached."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import EndOfDataError, OrderError, StateError
from lockstep.integers import check_integer
from lockstep.metrics import Mean, Observed, as_mean, read_means
from lockstep.replicas import OneIntraOpThread
from lockstep.state import check_keys
from lockstep.trainer.ending import call_and_catch, report_failure
from lockstep.trainer.extension import Action, Extension, FunctionExtension
from lockstep.trainer.synchronized_progress import SynchronizedProgress
from lockstep.triggers import Progress, Trigger, TriggerSpec, get_trigger, get_until
from lockstep.updaters import Updater

STATE_KEYS = ("updater", "until", "triggers", "extensions", "elapsed_time", "observation", "due", "pending")


@dataclass(frozen=True, eq=False)
class ExtensionEntry:
    """An extension of a trainer, with the name, the trigger and the priority it was added with."""

    name: str
    extension: Extension
    trigger: Trigger
    priority: int
    call_before_training: bool


class Trainer:
    """Runs updates, and after each update the extensions whose triggers fire, until a bound is reached.

    One iteration::

        update → for each extension by descending priority: collect, call its trigger, call it if that fired

    An extension that raises ends the run, and so does Ctrl-C; calling `run` again continues exactly there, with
    the extension that did not finish. A state that an extension saves contains how far the iteration had come:
    when it is loaded, the run continues with the extensions after that one, and calls the trigger of each once
    for that iteration. In the process that saved the state they have run too, so an extension that saves should
    come last.

    Args:
        updater: The updater that runs the updates.
        until: The end of the run: ``(bound, unit)``, such as ``(10, "epoch")`` or ``(500, "iteration")``; a
            trigger, which ends the run when it fires first; or None for a run without end. It is called before
            each update.
        out: The folder for the files of extensions; it is created when the run starts.
        extensions: Extensions to add with their default names, triggers and priorities.

    Attributes:
        updater: The updater that runs the updates.
        until: The trigger that ends the run.
        out: The folder for files.
        observation: The values observed in the last update and by the extensions after it, by name.

    With several processes, each process runs all extensions at the same iterations: triggers see the numbers of
    the whole batch and the clock of rank 0. Extensions that print or write do so on rank 0 (`is_main`).

    Determinism: the order of all calls depends only on priorities and on the order of the calls of `extend`.
    """

    def __init__(
        self,
        updater: Updater,
        until: TriggerSpec = (10, "epoch"),
        out: str | Path = "runs/x",
        extensions: Iterable[Extension | Action] = (),
    ) -> None:
        if not isinstance(updater, Updater):
            raise TypeError(f"`updater` must be a lockstep Updater, got a {type(updater).__name__}.")
        self.updater = updater
        self._until = get_until(until)
        self.out = Path(out)
        self.observation: dict[str, Observed] = {}
        self._entries: dict[str, ExtensionEntry] = {}
        self._order: list[ExtensionEntry] = []
        # The extensions that are still to come in this iteration, and the one whose trigger has fired: a trigger
        # must be called once per iteration, even if its extension raised and is called again.
        self._pending: deque[ExtensionEntry] = deque()
        self._due: ExtensionEntry | None = None
        self._initialized: list[ExtensionEntry] = []
        self._begun = False
        self._elapsed = 0.0
        self._started: float | None = None
        self._synchronized = SynchronizedProgress(self) if updater.communicator.size > 1 else None
        for extension in extensions:
            self.extend(extension)
        updater.connect_trainer(self)

    @property
    def until(self) -> Trigger:
        """The trigger that ends the run; you may set it to a pair such as ``(10, "epoch")``."""
        return self._until

    @until.setter
    def until(self, until: TriggerSpec) -> None:
        self._until = get_until(until)

    @property
    def _progress(self) -> Progress:
        """The run as seen by triggers."""
        return self if self._synchronized is None else self._synchronized

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for the run: the only process, or rank 0."""
        return self.updater.communicator.rank == 0

    @property
    def elapsed_time(self) -> float:
        """The duration of the run in seconds, including the time before it was resumed."""
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + now

    def extend(
        self,
        extension: Extension | Action,
        *,
        name: str | None = None,
        trigger: TriggerSpec = None,
        priority: int | None = None,
        call_before_training: bool | None = None,
    ) -> None:
        """Add an extension; arguments that you omit are the defaults of the extension.

        Args:
            extension: An `Extension`, or any function of the trainer. It is not changed.
            name: The name in this trainer; a second extension of a name becomes ``name_1``, a third ``name_2``.
            trigger: The trigger that decides when it is called. For an extension that is never called, pass
                `triggers.Never()`.
            priority: The priority in an iteration; extensions with higher priority run first.
            call_before_training: Whether it is also called once before the first update.

        Raises:
            TypeError: If the extension is not callable, or the trigger is not a trigger.
            ValueError: If the trigger belongs to another extension, or is out of range.
            OrderError: If the trainer is running.
        """
        if not callable(extension):
            raise TypeError(f"`extension` must be an Extension or a function of the trainer, got {extension!r}.")
        if self._started is not None:
            raise OrderError("`extend` must not be called during a run.")
        if not isinstance(extension, Extension):
            extension = FunctionExtension(extension)
        if priority is not None:
            check_integer("priority", priority)
        before = extension.call_before_training if call_before_training is None else call_before_training
        entry = ExtensionEntry(
            name=self._unique_name(name or extension.name),
            extension=extension,
            trigger=self._unshared_trigger(extension.trigger if trigger is None else trigger),
            priority=extension.priority if priority is None else priority,
            call_before_training=before,
        )
        self._entries[entry.name] = entry
        # The sort is stable: extensions of one priority stay in the order in which they were added.
        self._order = sorted(self._entries.values(), key=lambda each: -each.priority)

    def get_extension(self, name: str) -> Extension:
        """Return the extension of a name; a function is returned as the `FunctionExtension` that wraps it.

        Args:
            name: The name under which the extension was added.

        Raises:
            KeyError: If there is no extension of this name; the message lists the names.
        """
        if name not in self._entries:
            raise KeyError(f"`name` must be one of {sorted(self._entries)}, got {name!r}.")
        return self._entries[name].extension

    def name_of(self, extension: Extension) -> str:
        """Return the name under which an extension was added.

        Args:
            extension: An extension of this trainer.

        Raises:
            KeyError: If it is not an extension of this trainer.
        """
        for entry in self._entries.values():
            if entry.extension is extension:
                return entry.name
        raise KeyError(f"`extension` must be one of {sorted(self._entries)}, got {extension.name!r}.")

    def observe(self, name: str, value: Observed) -> None:
        """Add a value to the observation of this iteration, for the extensions that run later.

        Args:
            name: The name of the value, such as ``"validation/main/accuracy"``; a value of the same name is replaced.
            value: A `Mean`, a number or a 0-d tensor, which stays on its device until it is read.

        Raises:
            TypeError: If the value is none of these.
        """
        as_mean(value)
        self.observation[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def run(self) -> None:
        """Train until the end of the run; continue where an earlier call was interrupted.

        For a run that has ended, nothing is called. The calling thread computes with one intra-op thread during the
        run, including extensions, so that the numbers they compute do not depend on the number of cores.

        Raises:
            OrderError: If the trainer is running.
            EndOfDataError: If the iterator ends before `until` is reached.

        An exception is raised again after `on_error` and `finalize` of each extension and `finalize` of the updater
        were called. If one of these raises too, that error is printed to stderr and added as a note to the exception;
        it neither replaces the exception nor prevents the other calls.
        """
        if self._started is not None:
            raise OrderError("`run` must not be called during a run.")
        self.until.initialize(self._progress)
        if self._finished():
            return
        # Only now, because a run that has already ended must not write anything.
        self.out.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        try:
            # For the whole run and not only within updates, each of which would take longer by the changes.
            with OneIntraOpThread():
                self._initialize()
                self._finish_iteration()
                while not self.until(self._progress):
                    self._update()
                    self._finish_iteration()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def state_dict(self) -> dict[str, object]:
        """Return the state of the whole run: of the updater, the triggers and the extensions.

        If an extension calls it, the state also contains which extensions are still to come in this iteration.
        """
        return {
            "updater": self.updater.state_dict(),
            "until": self.until.state_dict(),
            "triggers": {name: entry.trigger.state_dict() for name, entry in self._entries.items()},
            "extensions": {name: entry.extension.state_dict() for name, entry in self._entries.items()},
            "elapsed_time": self.elapsed_time,
            "observation": read_means({name: as_mean(value) for name, value in self.observation.items()}),
            "due": None if self._due is None else self._due.name,
            "pending": [entry.name for entry in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; the same extensions must have been added under the same names.

        Args:
            state: The state that `state_dict` returned; left untouched.

        Raises:
            StateError: If a key is missing or unknown, here or in a part. Triggers and extensions are then
                restored, and the updater, which is loaded last, is unchanged.
            OrderError: If the trainer is running.
        """
        if self._started is not None:
            raise OrderError("`load_state_dict` must not be called during a run.")
        check_keys(state, STATE_KEYS, of="Trainer")
        check_keys(state["triggers"], self._entries, of="the triggers of Trainer")
        check_keys(state["extensions"], self._entries, of="the extensions of Trainer")
        unknown = {*state["pending"], state["due"]} - {None, *self._entries}
        if unknown:
            raise StateError(f"The state of Trainer must name its extensions as pending, got {sorted(unknown)}.")
        # Last among what can fail.
        self._load_parts(state)
        self._elapsed = state["elapsed_time"]
        self.observation = {name: Mean(*pair) for name, pair in state["observation"].items()}
        self._due = None if state["due"] is None else self._entries[state["due"]]
        self._pending = deque(self._entries[name] for name in state["pending"])

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        """Load every part, the updater last; if one raises, restore those that were already loaded."""
        parts: list[tuple[Trigger | Extension | Updater, Mapping[str, Any]]] = [(self.until, state["until"])]
        for name, entry in self._entries.items():
            parts.append((entry.trigger, state["triggers"][name]))
            parts.append((entry.extension, state["extensions"][name]))
        before = [(part, copy.deepcopy(part.state_dict())) for part, _ in parts]
        # Last, so that it need not be restored: its state is as large as the model, and it loads all or nothing.
        parts.append((self.updater, state["updater"]))
        try:
            for part, saved in parts:
                part.load_state_dict(saved)
        except BaseException:
            for changed_part, saved in before:
                changed_part.load_state_dict(saved)
            raise

    def _unshared_trigger(self, spec: TriggerSpec) -> Trigger:
        """Return the trigger of a new extension; the second of two callers would never see it fire."""
        trigger = get_trigger(spec)
        for entry in self._entries.values():
            if entry.trigger is trigger:
                raise ValueError(f"`trigger` must not be another extension's, got that of {entry.name}. Use a new one.")
        return trigger

    def _unique_name(self, name: str) -> str:
        """Return a name that no extension has, with a number appended if necessary."""
        count = 0
        while (free := f"{name}_{count}" if count else name) in self._entries:
            count += 1
        return free

    def _finished(self) -> bool:
        """Return whether the run has ended, with all extensions of its last iteration."""
        return self._due is None and not self._pending and self.until(self._progress)

    def _initialize(self) -> None:
        """Initialize triggers and extensions; before the first update also call the extensions that request it."""
        for entry in self._order:
            entry.trigger.initialize(self._progress)
            # An extension that will never be called need not open files or processes.
            if not entry.trigger.finished or entry is self._due:
                entry.extension.initialize(self)
                self._initialized.append(entry)
        if self.updater.iteration == 0 and not self._begun:
            for entry in self._order:
                if entry.call_before_training:
                    entry.extension(self)
        self._begun = True

    def _update(self) -> None:
        """Run one update, and queue all extensions for this iteration."""
        try:
            result = self.updater.update()
        except StopIteration as end:
            raise EndOfDataError(
                f"The iterator ended after {self.updater.epoch_detail:g} epochs and {self.updater.iteration} updates, "
                f"before `until` ({self.until!r}) was reached. Give an iterator that repeats, such as "
                "lockstep.BatchIterator(..., repeat=True), a DataLoader or another source that can be iterated over "
                "again; or a smaller `until`."
            ) from end
        self.observation = {f"main/{name}": mean for name, mean in result.observation().items()}
        self._pending.extend(self._order)

    def _finish_iteration(self) -> None:
        """Call the extensions that are still to come in this iteration."""
        while self._due is not None or self._pending:
            if self._due is None:
                entry = self._pending.popleft()
                entry.extension.collect(self)
                if entry.trigger(self._progress):
                    self._due = entry
            else:
                self._call_due(self._due)

    def _call_due(self, entry: ExtensionEntry) -> None:
        """Call an extension whose trigger has fired; if it raises, it stays due."""
        # A state that the extension saves must not list the extension itself as still to come.
        self._due = None
        try:
            entry.extension(self)
        except BaseException:
            self._due = entry
            raise

    def _close(self, error: BaseException | None) -> None:
        """Call everything that must be called when a run ends, even if some of it fails; then raise the first error."""
        entries = self._initialized
        calls: list[tuple[str, Callable[[], object]]] = []
        if error is not None:
            calls += [(f"`on_error` of {each.name}", partial(each.extension.on_error, self, error)) for each in entries]
        calls += [(f"`finalize` of {each.name}", partial(each.extension.finalize, self)) for each in entries]
        calls.append(("`finalize` of the updater", self.updater.finalize))
        first = error
        for what, call in calls:
            failure = call_and_catch(call)
            if failure is not None and first is not None:
                report_failure(what, failure, original=first)
            first = first or failure
        self._initialized.clear()
        self._elapsed, self._started = self.elapsed_time, None
        if error is None and first is not None:
            raise first
