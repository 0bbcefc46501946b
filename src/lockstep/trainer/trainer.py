"""The training loop: update, then whatever was hung in, until it is time to stop."""

from __future__ import annotations

import copy
import sys
import time
import traceback
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
from lockstep.trainer.agreed import AgreedProgress
from lockstep.trainer.extension import Action, Extension, FunctionExtension
from lockstep.triggers import Progress, Trigger, TriggerSpec, get_trigger, get_until
from lockstep.updaters import Updater

KEYS = ("updater", "until", "triggers", "extensions", "elapsed_time", "observation", "due", "pending")


@dataclass(frozen=True, eq=False)
class Entry:
    """An extension as it was hung in: under this name, with this trigger, at this priority."""

    name: str
    extension: Extension
    trigger: Trigger
    priority: int
    call_before_training: bool


class Trainer:
    """Runs updates, and after each the extensions whose triggers fire, until a bound is reached.

    One iteration::

        update → for each extension by descending priority: collect, ask its trigger, call it

    An extension that raises ends the run, and so does Ctrl-C; `run` called again goes on exactly
    there, with the extension that did not finish. A state saved by an extension holds how far
    the iteration had come: loaded, the run goes on with the extensions after that one, each of
    which is asked about that very iteration, once. Where the process that saved it lived on, they
    ran there as well; so whoever saves had better come last.

    Args:
        updater: Makes the updates.
        until: ``(bound, unit)``, such as ``(10, "epoch")`` or ``(500, "iteration")``; or a trigger, at
            whose first firing the run ends; None for a run without end. It is asked before each update.
        out: The folder for whatever extensions write; made when the run begins.
        extensions: Hung in with their own names, triggers and priorities.

    Attributes:
        updater: Makes the updates.
        until: The trigger that ends the run.
        out: The folder for files.
        observation: What the last update and the extensions after it observed, by name.

    Over several processes every one runs all extensions at the same iterations: triggers see the numbers of
    the whole batch, and rank 0's clock. What prints or writes does so on rank 0 (`is_main`).

    Determinism: the order of everything depends on priorities and on the order of `extend` alone.
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
        self._entries: dict[str, Entry] = {}
        self._order: list[Entry] = []
        self._pending: deque[Entry] = deque()
        self._due: Entry | None = None
        self._initialized: list[Entry] = []
        self._begun = False
        self._elapsed = 0.0
        self._started: float | None = None
        self._agreed = AgreedProgress(self) if updater.communicator.size > 1 else None
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
        """The run as triggers see it."""
        return self if self._agreed is None else self._agreed

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for the run: a process that is alone, or rank 0."""
        return self.updater.communicator.rank == 0

    @property
    def elapsed_time(self) -> float:
        """How many seconds the run has taken, those before a resume included."""
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
        """Hang an extension in; what is left out, the extension says itself.

        Args:
            extension: An `Extension`, or any function of the trainer. It is not changed.
            name: What it is called here; a second one of a name becomes ``name_1``, a third ``name_2``.
            trigger: When it is called. To hang one in that is never called, give `triggers.Never()`.
            priority: Its place in the iteration; higher ones come first.
            call_before_training: Whether it is also called once before the first update.

        Raises:
            TypeError: It cannot be called, or the trigger is none.
            ValueError: The trigger is another extension's already, or is out of range.
            OrderError: The run is under way.
        """
        if not callable(extension):
            raise TypeError(f"`extension` must be an Extension or a function of the trainer, got {extension!r}.")
        if self._started is not None:
            raise OrderError("`extend` must be called while the run is not under way.")
        if not isinstance(extension, Extension):
            extension = FunctionExtension(extension)
        if priority is not None:
            check_integer("priority", priority)
        before = extension.call_before_training if call_before_training is None else call_before_training
        entry = Entry(
            name=self._free_name(name or extension.name),
            extension=extension,
            trigger=self._own_trigger(extension.trigger if trigger is None else trigger),
            priority=extension.priority if priority is None else priority,
            call_before_training=before,
        )
        self._entries[entry.name] = entry
        self._order = sorted(self._entries.values(), key=lambda each: -each.priority)

    def get_extension(self, name: str) -> Extension:
        """Return the extension of this name; a function comes as the `FunctionExtension` that wraps it.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """
        if name not in self._entries:
            raise KeyError(f"`name` must be one of {sorted(self._entries)}, got {name!r}.")
        return self._entries[name].extension

    def name_of(self, extension: Extension) -> str:
        """Return the name under which an extension was hung in.

        Raises:
            KeyError: It was not.
        """
        for entry in self._entries.values():
            if entry.extension is extension:
                return entry.name
        raise KeyError(f"`extension` must be one of {sorted(self._entries)}, got {extension.name!r}.")

    def observe(self, name: str, value: Observed) -> None:
        """Add a value to the observation of this iteration, for those who run later to see.

        Args:
            name: Such as ``"validation/main/accuracy"``; a value of the same name is replaced.
            value: A `Mean`, a number or a 0-d tensor, which stays on its device until it is read.

        Raises:
            TypeError: It is something else.
        """
        as_mean(value)
        self.observation[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def run(self) -> None:
        """Train until it is time to stop; go on where an earlier call was interrupted.

        A finished run is left as it is: nothing is called. The calling thread computes with one intra-op
        thread during the run, extensions included, so that no number of cores shows in what they measure.

        Raises:
            OrderError: The run is under way.
            EndOfDataError: If the iterator ends before `until` is reached.

        An exception is passed on after each extension's `on_error` and `finalize` and the
        updater's `finalize` were called. What fails among these is reported on stderr and noted on
        the exception; it neither hides it nor keeps the others from being called.
        """
        if self._started is not None:
            raise OrderError("`run` must not be called while the run is under way.")
        self.until.initialize(self._progress)
        if self._finished():
            return
        self.out.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        try:
            # For the whole run, not only within updates: to change it back and forth would cost each update.
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

        Called by an extension, it says which extensions were still to come in this iteration.
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
        """Go on from a saved state; the same extensions must have been hung in under the same names.

        Args:
            state: What `state_dict` returned; left untouched.

        Raises:
            StateError: A key is missing or unknown, here or in a part. Triggers and extensions
                are then put back as they were, and the updater, which comes last, is unchanged.
            OrderError: The run is under way.
        """
        if self._started is not None:
            raise OrderError("`load_state_dict` must be called while the run is not under way.")
        check_keys(state, KEYS, of="Trainer")
        check_keys(state["triggers"], self._entries, of="the triggers of Trainer")
        check_keys(state["extensions"], self._entries, of="the extensions of Trainer")
        unknown = {*state["pending"], state["due"]} - {None, *self._entries}
        if unknown:
            raise StateError(f"The state of Trainer must name its extensions as pending, got {sorted(unknown)}.")
        self._load_parts(state)
        self._elapsed = state["elapsed_time"]
        self.observation = {name: Mean(*pair) for name, pair in state["observation"].items()}
        self._due = None if state["due"] is None else self._entries[state["due"]]
        self._pending = deque(self._entries[name] for name in state["pending"])

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        """Load every part, the updater last; put back those already loaded when one refuses."""
        parts: list[tuple[Trigger | Extension | Updater, Mapping[str, Any]]] = [(self.until, state["until"])]
        for name, entry in self._entries.items():
            parts.append((entry.trigger, state["triggers"][name]))
            parts.append((entry.extension, state["extensions"][name]))
        before = [(part, copy.deepcopy(part.state_dict())) for part, _ in parts]
        parts.append((self.updater, state["updater"]))
        try:
            for part, own in parts:
                part.load_state_dict(own)
        except BaseException:
            for old_part, own in before:
                old_part.load_state_dict(own)
            raise

    def _own_trigger(self, spec: TriggerSpec) -> Trigger:
        """Return the trigger; one that two ask would tell the second that nothing has happened since."""
        trigger = get_trigger(spec)
        for entry in self._entries.values():
            if entry.trigger is trigger:
                raise ValueError(f"`trigger` must be no other extension's, got that of {entry.name}. Make a second.")
        return trigger

    def _free_name(self, name: str) -> str:
        count = 0
        while (free := f"{name}_{count}" if count else name) in self._entries:
            count += 1
        return free

    def _finished(self) -> bool:
        return self._due is None and not self._pending and self.until(self._progress)

    def _initialize(self) -> None:
        """Get everything ready; before the first update also call those that asked for it."""
        for entry in self._order:
            entry.trigger.initialize(self._progress)
            if not entry.trigger.finished or entry is self._due:
                entry.extension.initialize(self)
                self._initialized.append(entry)
        if self.updater.iteration == 0 and not self._begun:
            for entry in self._order:
                if entry.call_before_training:
                    entry.extension(self)
        self._begun = True

    def _update(self) -> None:
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
        """Call the extensions that are left in this iteration."""
        while self._due is not None or self._pending:
            if self._due is None:
                entry = self._pending.popleft()
                entry.extension.collect(self)
                if entry.trigger(self._progress):
                    self._due = entry
            else:
                self._call_due(self._due)

    def _call_due(self, entry: Entry) -> None:
        # A state that the extension saves must not hold the extension itself as still to come.
        self._due = None
        try:
            entry.extension(self)
        except BaseException:
            self._due = entry
            raise

    def _close(self, error: BaseException | None) -> None:
        """Call everything that must be called at the end, whatever fails; then raise what failed first."""
        entries = self._initialized
        calls: list[tuple[str, Callable[[], object]]] = []
        if error is not None:
            calls += [(f"`on_error` of {each.name}", partial(each.extension.on_error, self, error)) for each in entries]
        calls += [(f"`finalize` of {each.name}", partial(each.extension.finalize, self)) for each in entries]
        calls.append(("`finalize` of the updater", self.updater.finalize))
        first = error
        for what, call in calls:
            failure = _failure(call)
            if failure is not None and first is not None:
                _report(what, failure, beside=first)
            first = first or failure
        self._initialized.clear()
        self._elapsed, self._started = self.elapsed_time, None
        if error is None and first is not None:
            raise first


def _failure(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as failure:  # noqa: BLE001 - the caller raises or reports it
        return failure
    return None


def _report(what: str, failure: BaseException, *, beside: BaseException) -> None:
    """Say on stderr that something failed while the run was ending, and note it on what ended the run."""
    lines = traceback.format_exception(type(failure), failure, failure.__traceback__, chain=False)
    sys.stderr.write(f"{what} raised while the run ended with {type(beside).__name__}:\n{''.join(lines)}")
    if sys.version_info >= (3, 11):
        beside.add_note(f"{what} raised, too: {lines[-1].strip()}")
