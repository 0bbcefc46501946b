"""The training loop, which runs updates and extensions until a bound is reached."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.arguments import check_instance, check_integer, look_up
from lockstep.elsewhere import EXTEND, RUN, TRAINER, TRAINER_NAMES, KnowsOthers, names_ours
from lockstep.errors import EndOfDataError, OrderError, SignalExit, StateError, collect_error, warn
from lockstep.metrics import Mean, Observed, as_mean, read_means
from lockstep.prediction import Prediction, runner_of
from lockstep.replicas import BatchDim, OneIntraOpThread
from lockstep.snapshots import Resumption, find, fitting, prepare
from lockstep.state import check_keys, load_all
from lockstep.stopping import STOP, interrupting
from lockstep.trainer.extension import (
    Action,
    Extension,
    ExtensionEntry,
    as_extension,
    check_extensions,
    check_same_on_ranks,
    unsaved_of,
)
from lockstep.trainer.surroundings import SynchronizedProgress, report_failure, say, trial_folder
from lockstep.triggers import Never, Progress, Trigger, TriggerSpec, get_trigger, get_until, position, reached
from lockstep.updaters import Converter, Result, Updater

STATE_KEYS = ("updater", "until", "triggers", "extensions", "elapsed_time", "observation", "due", "pending")


class Trainer(KnowsOthers):
    """Runs updates, and after each update the extensions whose triggers fire, until a bound is reached.

    One iteration::

        update → each extension by descending priority: collect, call its trigger, call it if that fired

    An extension that raises ends the run, and so does Ctrl-C; calling `run` again continues exactly there, with the
    extension that did not finish. A state that an extension saves contains how far the iteration had come: when it is
    loaded, the run continues with the extensions after that one, and calls the trigger of each once for that iteration.
    In the process that saved the state they have run too, so an extension that saves should come last.

    Args:
        updater: The updater that runs the updates.
        until: The end of the run: ``(bound, unit)``, such as ``(10, "epoch")`` or ``(500, "iteration")``; a trigger,
            which is called before each update and ends the run when it fires first; or None for a run without end.
        out: The folder for the files of extensions; it is created when the run starts.
        extensions: Extensions to add with their default names, triggers and priorities.
        fast_dev_run: True or a number of updates for a trial of the whole program: that many updates (True: 1), after
            which every extension is called once, evaluations on at most as many batches; False for a usual run. `until`
            and triggers are ignored, and files are written to a temporary folder.

    Attributes:
        updater: The updater that runs the updates.
        until: The trigger that ends the run.
        out: The folder for files.
        fast_dev_run: The number of updates of a trial; 0 for a usual run.
        observation: The values observed in the last update and by the extensions after it, by name.
        result: What the last update returned; None before the first one of this process.
        resumption: The snapshot from which `run` resumed; None if it did not.
        error: The exception that ends the run, while `on_error` and `finalize` of extensions are called; otherwise
            None.

    With several processes, each process runs all extensions at the same iterations: triggers see the numbers of
    the whole batch and the clock of rank 0. Extensions that print or write do so on rank 0 (`is_main`).

    Determinism: the order of all calls depends only on priorities and on the order of the calls of `extend`.
    """

    _others = TRAINER_NAMES

    @names_ours(TRAINER)
    def __init__(
        self,
        updater: Updater,
        until: TriggerSpec = (10, "epoch"),
        out: str | Path = "runs/x",
        extensions: Iterable[Extension | Action] = (),
        *,
        fast_dev_run: bool | int = False,
    ) -> None:
        remedy = "Create one: lockstep.ParallelUpdater(iterator, optimizer, model, loss_fn=...)."
        check_instance("updater", updater, Updater, "a lockstep Updater", remedy)
        check_instance("extensions", extensions, Iterable, "a list of extensions", "Put it into a list.")
        check_instance("out", out, str | os.PathLike, "the path of a folder")
        self.updater = updater
        if not isinstance(fast_dev_run, bool):
            check_integer("fast_dev_run", fast_dev_run, minimum=0)
        self.fast_dev_run = int(fast_dev_run)
        self._until = get_until((self.fast_dev_run, "iteration") if self.fast_dev_run else until)
        self.out = trial_folder(updater.communicator, self) if self.fast_dev_run else Path(out)
        self.observation: dict[str, Observed] = {}
        self.result: Result | None = None
        self._entries: dict[str, ExtensionEntry] = {}
        self._order: list[ExtensionEntry] = []
        # The extensions that are still to come in this iteration, and the one whose trigger has fired: a trigger
        # must be called once per iteration, even if its extension raised and is called again.
        self._pending: deque[ExtensionEntry] = deque()
        self._due: ExtensionEntry | None = None
        self._initialized: list[ExtensionEntry] = []
        self._begun, self._unsaved = False, unsaved_of([])
        self._elapsed = 0.0
        self._started: float | None = None
        self._stopped = False
        self._synchronized = SynchronizedProgress(self) if updater.communicator.size > 1 else None
        self.resumption: Resumption | None = None
        self.error: BaseException | None = None
        for extension in extensions:
            self.extend(extension)
        updater.connect_trainer(self)

    def __repr__(self) -> str:
        ending = f"until={self.until!r}, out={str(self.out)!r}), {self.updater.iteration} updates done"
        called = [f"\n  {each.name}: trigger {each.trigger!r}, priority {each.priority}" for each in self._order]
        return f"Trainer({type(self.updater).__name__}, {ending}{''.join(called)}"

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
        """Whether this process prints and writes for the run, as the only process or rank 0 does."""
        return self.updater.communicator.rank == 0

    @property
    def elapsed_time(self) -> float:
        """The duration of the run in seconds, including the time before it was resumed."""
        return self._elapsed + (0.0 if self._started is None else time.perf_counter() - self._started)

    @names_ours(EXTEND)
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
            extension: An `Extension`, or any function of the trainer, see `as_extension`. It is not changed.
            name: The name in this trainer; a second extension of a name becomes ``name_1``, a third ``name_2``.
            trigger: The trigger that decides when it is called. For an extension that is never called, pass
                `triggers.Never()`.
            priority: The priority in an iteration; extensions with higher priority run first.
            call_before_training: Whether it is also called once before the first update.

        Raises:
            TypeError: If the extension is not callable, one of its methods cannot be called as a trainer does, or the
                trigger is not a trigger.
            ValueError: If the trigger belongs to another extension, or is out of range.
            OrderError: If the trainer is running, or has this extension already.
        """
        extension = as_extension(extension, trigger=trigger, priority=priority)
        if any(entry.extension is extension for entry in self._order):
            raise OrderError(
                f"`extension` must not be added twice, got {self.name_of(extension)} again. Create another one, or "
                "join triggers by `|`."
            )
        if self._started is not None:
            raise OrderError("`extend` must not be called during a run.")
        priority = extension.priority if priority is None else priority
        check_integer("priority", priority)
        before = extension.call_before_training if call_before_training is None else call_before_training
        unique, found = self._unique_name(name or extension.name), self._trigger_for(extension, trigger)
        self._entries[unique] = ExtensionEntry(unique, extension, found, priority, before)
        # The sort is stable: extensions of one priority stay in the order in which they were added.
        self._order = sorted(self._entries.values(), key=lambda each: -each.priority)

    def remove(self, name: str) -> None:
        """Remove an extension, for example to add a corrected one in its place after it has raised an error.

        Args:
            name: The name under which the extension was added.

        Raises:
            KeyError: If there is no extension of this name; the message lists the names.
            OrderError: If the trainer is running.
        """
        if self._started is not None:
            raise OrderError("`remove` must not be called during a run.")
        removed = look_up(name, self._entries)
        del self._entries[name]
        self._order.remove(removed)
        self._pending = deque(each for each in self._pending if each is not removed)
        self._due = None if self._due is removed else self._due

    @property
    def extensions(self) -> dict[str, Extension]:
        """All extensions by name, in the order in which they were added, in a new dict."""
        return {name: entry.extension for name, entry in self._entries.items()}

    def get_extension(self, name: str) -> Extension:
        """Return the extension of a name; a function is returned as the `FunctionExtension` that wraps it.

        Args:
            name: The name under which the extension was added.

        Raises:
            KeyError: If there is no extension of this name; the message lists the names.
        """
        return look_up(name, self._entries).extension

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
        raise KeyError(
            f"`extension` must be one of {sorted(self._entries)}, got another one called {extension.name!r}. Add it by "
            "trainer.extend(extension). To evaluate at once, call evaluate(model) of an Evaluator."
        )

    def observe(self, name: str, value: Observed) -> None:
        """Add a value to the observation of this iteration, for the extensions that run later.

        Args:
            name: The name of the value, such as ``"validation/main/accuracy"``; a value of the same name is replaced.
            value: A `Mean`, a number or a 0-d tensor, of which a copy stays on its device until it is read.

        Raises:
            TypeError: If the value is none of these.
        """
        as_mean(value)
        # Read when a mean is needed, after the tensor may have been changed in place.
        self.observation[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    @names_ours(RUN)
    @interrupting()
    def run(self, resume: Literal["auto"] | str | Path | None = None, accept: Collection[str] = ()) -> None:
        """Train until the end of the run; continue where an earlier call was interrupted, or from a snapshot.

        Args:
            resume: ``"auto"`` for the newest whole snapshot in `out`, if there is one, unless this trainer has begun;
                or the folder of a snapshot or of a run; or None.
            accept: The names of fields of the recipe that may differ from those of the snapshot.

        A run that has ended writes nothing. The calling thread computes with one intra-op thread during the run,
        including extensions, so that what they compute does not depend on the number of cores.

        Raises:
            OrderError: If the trainer is running.
            DisagreementError: If ranks have other extensions in which they act together, or other triggers for them.
            SnapshotError: If there are snapshots and none of them is whole.
            StateError: If the recipe differs from that of the snapshot in a field that `accept` does not name.
            EndOfDataError: If the iterator ends before `until` is reached.
            SignalExit: If a signal ended the run after a finished update; see `extensions.Snapshot`.
            KeyboardInterrupt: If it was Ctrl-C and the session is interactive, or if there is no `Snapshot`.

        An exception is raised again after `on_error` and `finalize` of each extension and `finalize` of the updater
        were called. If one of these raises too, that error is printed to stderr and added to it as a note.
        """
        if self._started is not None:
            raise OrderError("`run` must not be called during a run.")
        check_same_on_ranks(self.updater.communicator, self._order)
        if resume is not None and not (resume == "auto" and self._begun):
            self.resumption = self._resume(resume, accept) or self.resumption
        self.until.initialize(self._progress)
        for entry in self._order:
            entry.extension.prepare(self)
        # Ended, with all extensions of the last iteration.
        if self._due is None and not self._pending and self.until(self._progress):
            if resume is not None and self.is_main:
                say(
                    f"Nothing to train: the run in {self.out} is at update {self.updater.iteration}, where `until` "
                    f"({self.until!r}) is reached. Pass a later `until`, or another `out`."
                )
            return
        self._stopped = False
        if self.out.exists() and not self.out.is_dir():
            raise NotADirectoryError(f"`out` must be a folder, got {str(self.out)!r}, which is a file.")
        self.out.mkdir(parents=True, exist_ok=True)  # after the check: a run that has ended must not write anything
        self._started = time.perf_counter()
        try:
            with OneIntraOpThread():  # not only within updates, each of which would take longer by the changes
                self._initialize()
                self._finish_iteration()
                while not self._stopped and not self.until(self._progress):
                    self._update()
                    self._finish_iteration()
        except BaseException as error:
            self._close(error)
            self._say_stopped(error)
            raise
        self._close(None)
        limit = None if self._stopped else self.until.limit
        if self.is_main and limit is not None and not reached(position(self._progress, limit[1]), limit[0]):
            say(f"Stopped after update {self.updater.iteration} by {self.until!r}, before {limit!r}.")

    def stop(self) -> None:
        """End the run when the extensions of this iteration have been called; another call of `run` continues it.

        With several processes, each of them must call it in the same iteration. A trigger as `until` ends a run, too,
        and a run that such a trigger has ended stays ended.
        """
        self._stopped = True

    def state_dict(self) -> dict[str, object]:
        """Return the state of the run: of the updater, the triggers and the extensions, and what is still to come."""
        return {"updater": self.updater.state_dict(), **self.surroundings()}

    def surroundings(self) -> dict[str, object]:
        """Return the state of the run without that of the updater."""
        self._unsaved.check()
        return {
            "until": self.until.state_dict(),
            "triggers": {name: entry.trigger.state_dict() for name, entry in self._entries.items()},
            "extensions": {name: entry.extension.state_dict() for name, entry in self._entries.items()},
            "elapsed_time": self.elapsed_time,
            "observation": read_means({name: as_mean(value) for name, value in self.observation.items()}),
            "due": None if self._due is None else self._due.name,
            "pending": [entry.name for entry in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = False) -> None:
        """Load a saved state; all or nothing.

        Extensions are matched by name. If some were added or removed since the state was saved, one warning on rank 0
        lists them: those that were added keep the state they have, and what was saved of the others is ignored. So does
        another kind of trigger, as of `until`.

        Args:
            state: The state that `state_dict` returned; left untouched.
            strict: Whether to refuse a state with other extensions, or other kinds of triggers, instead.

        Raises:
            StateError: If a key is missing or unknown, here or in a part; or if `strict` and the extensions differ.
                Nothing has been changed then.
            OrderError: If the trainer is running.
        """
        if self._started is not None:
            raise OrderError("`load_state_dict` must not be called during a run.")
        check_keys(state, STATE_KEYS, of="Trainer")
        # The warning comes before anything is loaded, so that nothing has changed if a filter raises it as an error.
        check_extensions(state, self._entries, strict=strict, warns=self.is_main)
        observation: dict[str, Observed] = {name: Mean(*pair) for name, pair in state["observation"].items()}
        # Last among what can fail.
        self._load_parts(state, strict=strict)
        self._elapsed = state["elapsed_time"]
        self.observation = observation
        # An extension that was removed is no longer to come, even if it was when the state was saved.
        self._due = self._entries.get(state["due"])
        self._pending = deque(self._entries[name] for name in state["pending"] if name in self._entries)

    def _resume(self, source: str | Path, accept: Collection[str]) -> Resumption | None:
        """Load a snapshot, see `run`; return None if the source is ``"auto"`` and there is none.

        After an error nothing of the trainer has changed.
        """
        if not isinstance(source, str | os.PathLike):
            raise TypeError(f'`resume` must be "auto", the folder of a snapshot or of a run, or None, got {source!r}.')
        snapshot = find(self.updater, source, self.out)
        if snapshot is None:
            saved = self.fast_dev_run or any(entry.extension.saves_run for entry in self._order)
            if self.is_main and not saved:
                warn(
                    f'`resume` is "auto", but {self.out} holds no snapshot, and no extension of this trainer writes '
                    "any: if this run is stopped, the same command starts anew. Call "
                    "trainer.extend(lockstep.extensions.Snapshot())."
                )
            return None
        # Not by the path of the snapshot, which may be one of another machine.
        same_run = source == "auto" or Path(source).resolve().is_relative_to(self.out.resolve())
        resumption = prepare(self.updater, snapshot, accept, same_run=same_run)
        if resumption.surroundings is None:
            raise StateError(
                f"Cannot resume a Trainer from {resumption.path}, which was saved without one. Load it into the "
                "updater by lockstep.snapshots.restore."
            )
        with fitting(resumption.path):
            self.load_state_dict({**resumption.surroundings, "updater": resumption.updater})
        # Its tensors are loaded, and would stay in memory until the run ends.
        return replace(resumption, updater={}, surroundings=None)

    def _load_parts(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load every part, or none."""
        names = [*filter(state["extensions"].__contains__, self._entries)]
        triggers = {"`until`": (self.until, state["until"])}
        triggers |= {name: (self._entries[name].trigger, state["triggers"][name]) for name in names}
        pairs = [] if strict else triggers.items()
        other = [name for name, (each, saved) in pairs if each.state_dict().keys() != saved.keys()]
        if other and self.is_main:
            warn(
                f"The saved state is that of another kind of trigger for {', '.join(other)}, which starts without it, "
                "as in a new run."
            )
        parts: list[tuple[Trigger | Extension | Updater, Mapping[str, Any]]] = []
        parts += [pair for name, pair in triggers.items() if name not in other]
        parts += [(self._entries[name].extension, state["extensions"][name]) for name in names]
        # The updater last, so that it need not be restored: its state is as large as the model.
        load_all([*parts, (self.updater, state["updater"])])

    def predict(
        self,
        dataset: Any,
        *,
        batch_size: int = 32,
        num_shards: int = 1,
        model_name: str = "main",
        output: Callable[[Any], Any] | None = None,
        target: bool | str | None = None,
        converter: Converter | None = None,
        output_dim: BatchDim = 0,
    ) -> Any:
        """Run the model on a dataset, on the devices and ranks of the updater and in its precision.

        Every rank makes this call, before, after or during a run (from an extension), and receives the outputs of all
        samples, on the CPU and in order. Training is not affected. See `lockstep.predict` for the arguments.

        Args:
            dataset: A dataset, or an iterable of batches.
            batch_size: The number of samples per batch of a dataset, at least 1.
            num_shards: The number of shards per batch, at least 1. With 1 each batch runs as a whole.
            model_name: The name of the updater's model to run.
            output: A function of the output of the model that returns what is collected.
            target: True if the last entry of a tuple is a target, or the key of the target in a dict.
            converter: Converts samples to tensors; by default that of the updater.
            output_dim: The dimension of outputs that counts samples.

        Returns:
            The outputs in containers like those of the model.

        Raises:
            KeyError: If there is no model of this name.
            ValueError: If there is no sample, or the outputs do not fit together.
            ReplicaError: If the model raised; the original error is the cause.
            DisagreementError: If the ranks were given different batches.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("num_shards", num_shards, minimum=1)
        look_up(model_name, self.updater.get_all_models(), "model_name")
        runner = runner_of(self.updater, num_shards=num_shards, model_name=model_name)
        return Prediction(output, target, converter, output_dim).run(runner, dataset, batch_size)

    def _trigger_for(self, extension: Extension, trigger: TriggerSpec) -> Trigger:
        """Return the trigger of a new extension: the given one, or its own, or in a trial the end of the run."""
        spec = extension.trigger if trigger is None else trigger
        if self.fast_dev_run and not isinstance(spec, Never):
            spec = (self.fast_dev_run, "iteration")
        found = get_trigger(spec)
        others: dict[str, object] = {f"that of {name}": entry.trigger for name, entry in self._entries.items()}
        others["that of `until`"] = getattr(self.until, "trigger", None)
        for whose, each in others.items():
            # The second of two callers would never see it fire.
            if each is found:
                raise ValueError(f"`trigger` must be called for one purpose only, got {whose}. Use a new one.")
        return found

    def _unique_name(self, name: str) -> str:
        """Return a name that no extension has, with a number appended if necessary."""
        count = 0
        while (free := f"{name}_{count}" if count else name) in self._entries:
            count += 1
        return free

    def _say_stopped(self, error: BaseException) -> None:
        """Print where a run stands that Ctrl-C or a signal has ended, and how it continues."""
        if not self.is_main or not isinstance(error, KeyboardInterrupt | SignalExit):
            return
        by = f" by {error.name}" if isinstance(error, SignalExit) else ""
        then = (
            'Its snapshot is written; the same command continues from there if it calls run(resume="auto").'
            if isinstance(error, SignalExit)
            else "No snapshot is written, because the run has no Snapshot extension; run() continues in this process."
        )
        say(f"Stopped after update {self.updater.iteration}{by}. {then}")

    def _initialize(self) -> None:
        """Initialize triggers and extensions; before the first update also call the extensions that request it."""
        for entry in self._order:
            entry.trigger.initialize(self._progress)
            # An extension that will never be called need not open files or processes.
            if not entry.trigger.finished or entry is self._due:
                entry.extension.initialize(self)
                self._initialized.append(entry)
        for entry in self._initialized:
            entry.extension.begin(self)
        if self.updater.iteration == 0 and not self._begun:
            for entry in self._order:
                if entry.call_before_training:
                    entry.extension.collect(self)
                    entry.extension(self)
        self._begun, self._unsaved = True, unsaved_of(self._order)

    def _update(self) -> None:
        """Run one update, and queue all extensions for this iteration."""
        for entry in self._initialized:
            entry.extension.before_update(self)
        try:
            self.result = self.updater.update()
        except StopIteration as end:
            raise EndOfDataError(
                f"The iterator ended after {self.updater.epoch_detail:g} epochs and {self.updater.iteration} updates, "
                f"before `until` ({self.until!r}) was reached. Give an iterator that repeats, such as "
                "lockstep.BatchIterator(..., repeat=True), a DataLoader or another source that can be iterated over "
                "again; or a smaller `until`."
            ) from end
        self.observation = {f"main/{name}": mean for name, mean in self.result.observation().items()}
        self._pending.extend(self._order)

    def _finish_iteration(self) -> None:
        """Call the extensions that are still to come in this iteration, then end the run if a signal asked for it."""
        while self._due is not None or self._pending:
            if self._due is None:
                entry = self._pending.popleft()
                entry.extension.collect(self)
                if entry.trigger(self._progress):
                    self._due = entry
            else:
                self._call_due(self._due)
        if STOP.agreed:
            raise SignalExit(STOP.agreed)

    def _call_due(self, entry: ExtensionEntry) -> None:
        """Call an extension whose trigger has fired; if it raises, it stays due."""
        # A state that the extension saves must not list the extension itself as still to come.
        self._due = None
        try:
            entry.extension(self)
        except BaseException as error:
            if not STOP.follows(error):
                self._due = entry
                raise

    def _close(self, error: BaseException | None) -> None:
        """Call everything that must be called when a run ends, even if some of it fails; then raise the first error."""
        entries, self.error = self._initialized, error
        calls: list[tuple[str, Callable[[], object]]] = []
        if error is not None:
            calls += [(f"`on_error` of {each.name}", partial(each.extension.on_error, self, error)) for each in entries]
        calls += [(f"`finalize` of {each.name}", partial(each.extension.finalize, self)) for each in entries]
        first, calls = error, [*calls, ("`finalize` of the updater", self.updater.finalize)]
        for what, call in calls:
            for failure in collect_error(call):
                if first is not None:
                    report_failure(what, failure, original=first)
                first = first or failure
        self._initialized.clear()
        # Its traceback keeps whatever the update held.
        self.error = None
        self._elapsed, self._started = self.elapsed_time, None
        if error is None and first is not None:
            raise first
