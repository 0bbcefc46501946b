"""Change a process so that it runs a script in one way, and records what its updates compute.

`Instruments` replaces methods of lockstep's classes for the rest of the process, which runs one script and ends.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import snapshots
from lockstep.data import BatchIterator
from lockstep.extensions import Snapshot
from lockstep.nest import map_tensors, named_tensors
from lockstep.plan import Shard
from lockstep.replicas import (
    DataParallel,
    FreshMemory,
    ReplicaGroup,
    ReplicaSet,
    ShardRunner,
    ShardStreams,
    parse_devices,
)
from lockstep.state import temporarily
from lockstep.trainer import Trainer
from lockstep.updaters import ParallelUpdater
from lockstep.verify.causes import LOOP, describe_parameters
from lockstep.verify.experiments import kind_of_shard, kind_of_step, pin_clocks
from lockstep.verify.modes import OperatorLog, TrainingCalls, users_line
from lockstep.verify.one_shard import compare_attempt
from lockstep.verify.recorder import LOCAL, Recorder, bits, of_parameters
from lockstep.verify.ways import REFERENCE, Job

Call = Callable[..., Any]
STATE: Final = "state.pt"
"""The file for the state of an updater that no trainer runs."""


def wrap(owner: type | ModuleType, name: str, wrapper: Call) -> None:
    """Replace a method, or a function of a module, for the rest of the process.

    Args:
        owner: The class or the module.
        name: The name of the method or function.
        wrapper: Called with the original, the object or the first argument, and the other arguments.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, method)


@dataclass(eq=False)
class ObservedTask:
    """A shard task that records what each shard gets and computes."""

    task: Any
    instruments: Instruments
    phase: str

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Run the task on a shard, and record it."""
        instruments, recorder, task = self.instruments, self.instruments.recorder, self.task
        if instruments.dying:
            os.kill(os.getpid(), signal.SIGKILL)
        model = runner.replicas.model
        instruments.models[id(model)] = model
        for name, parameter in model.named_parameters():
            recorder.names.setdefault(id(parameter), name)
        computation = recorder.computation
        read = getattr(task, "inputs", None)
        batch = given if read is None else _inputs(read, shard, runner)
        if batch is not None:
            recorder.shard(computation, shard.index, data={name: bits(each) for name, each in named_tensors(batch)})
        reports = getattr(task, "reports", None)
        before = 0 if reports is None else len(reports)
        is_target = instruments.is_target(computation, shard.index)
        kept = map_tensors(torch.clone, given) if is_target else None
        looks = instruments.job.way.one_shard and not torch.is_grad_enabled()
        evaluation = instruments.evaluation() if looks else nullcontext()
        with temporarily(LOCAL, shard=(computation, shard.index)), evaluation, instruments.modes(log=is_target) as log:
            task.run(runner, shard, given)
        if is_target:
            repeat = partial(kind_of_shard, runner, shard, kept, task) if reports is not None else str
            instruments.write_trace(log, repeat)
        if reports is not None and len(reports) > before:
            recorder.shard(computation, shard.index, loss=float(reports[-1].loss).hex())


def _inputs(inputs: Any, shard: Shard, runner: ShardRunner) -> Any:
    """Return what the model of a group gets for a shard."""
    given = inputs.shard_inputs(shard.samples, runner.device)
    return [*given.args, given.kwargs]


@dataclass(eq=False)
class Instruments:
    """What a job changes in its process.

    Attributes:
        job: The job.
        recorder: Where records are written.
        trainers: How many trainers the script has created.
        trainer: The last of them, which saves the state of its updater; None if there is none.
        snapshot: What writes the state at which another process resumes; None without one.
        dying: Whether the process is to be killed in the next shard.
        building: The updaters, groups and modules, by ``id``, whose constructors are running.
        resumed: Whether the state of an updater was loaded without a trainer.
        notes: The lines about the script that were written.
        models: The models of replicas and of updaters, by ``id``.
        optimizers: The optimizers that were stepped without an updater, by ``id``.
        compared: The gradients that were compared with those of a single shard, by engine and position.
    """

    job: Job
    recorder: Recorder
    trainers: int = 0
    trainer: Trainer | None = None
    snapshot: Snapshot | None = None
    dying: bool = False
    building: set[int] = field(default_factory=set)
    resumed: bool = False
    notes: set[str] = field(default_factory=set)
    models: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    compared: set[tuple[int, int]] = field(default_factory=set)

    def install(self) -> None:
        """Replace the methods."""
        for owner in (ParallelUpdater, ReplicaGroup, DataParallel):
            wrap(owner, "__init__", self.build)
        wrap(BatchIterator, "__init__", self.build_iterator)
        wrap(ParallelUpdater, "update", self.update)
        wrap(Trainer, "__init__", self.build_trainer)
        wrap(Trainer, "run", self.run_trainer)
        wrap(snapshots, "save", self.save)
        wrap(snapshots, "restore", self.restore)
        wrap(ShardRunner, "run", self.run_shards)
        wrap(ShardRunner, "pop_gradients", self.pop_gradients)
        wrap(ShardStreams, "run", self.run_streams)
        if self.job.way.reverse:
            wrap(ReplicaSet, "run", _run_in_turn)
            wrap(ReplicaSet, "_work", _work_reversed)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        if self.job.target is not None:
            pin_clocks()
            register_module_forward_pre_hook(_enter_module)
            register_module_forward_hook(_leave_module, always_call=True)
        if self.job.way.one_shard:
            register_module_forward_pre_hook(self.before_call)
        if self.job.way.threads is not None:
            torch.set_num_threads(self.job.way.threads)

    def note(self, **noted: Any) -> None:
        """Write a line about the script, once."""
        text = repr(noted)
        if text not in self.notes:
            self.notes.add(text)
            self.recorder.write({"note": noted})

    def build(self, original: Call, built: Any, *args: Any, **options: Any) -> None:
        """Create an updater, group or module on the devices of the way, with the shards of the script."""
        if id(built) in self.building:
            # The constructor of a class calls that of the class below.
            original(built, *args, **options)
            return
        self.building.add(id(built))
        positional = None
        if not isinstance(built, ParallelUpdater) and len(args) > 1:
            # `devices` is the second argument of a group and of a module.
            positional, args = args[1], (args[0], *args[2:])
        asked = options.get("devices", "auto") if positional is None else positional
        places = parse_devices(asked)
        if options.get("num_shards") is None:
            self.note(no_num_shards=type(built).__name__, places=len(places))
            options["num_shards"] = len(places)
        if isinstance(options.get("workloads"), (list, tuple)):
            options["workloads"] = None
        if isinstance(built, ParallelUpdater):
            self.note(updater=True)
            # An audit computes shards once more, and warns of what is looked for here.
            options["audit_every"] = 0
        first, count = places[0], self.job.way.devices
        if first.type == "cpu":
            options["devices"] = ["cpu"] * count
        else:
            number = torch.get_device_module(first).device_count()
            # From the first device of this rank on: NCCL takes no two ranks on one GPU.
            options["devices"] = [torch.device(first.type, (first.index + each) % number) for each in range(count)]
        try:
            original(built, *args, **options)
        finally:
            self.building.discard(id(built))
        if self.job.way.one_shard and isinstance(built, ParallelUpdater):
            engine: Any = built._engine  # noqa: SLF001 - what computes the gradients of all updates
            engine.compute = partial(self.compare, engine.compute, engine)

    def compare(self, original: Call, engine: Any, attempt: Any, context: Any) -> None:
        """Compare each gradient of the first update with that of a single shard, and compute it."""
        key = id(engine), attempt.request.computation
        found = None if key in self.compared else compare_attempt(engine, attempt)
        self.compared.add(key)
        if found is not None:
            self.recorder.write({"compared": [asdict(found)]})
        original(attempt, context)

    def build_iterator(self, original: Call, built: BatchIterator, *args: Any, **options: Any) -> None:
        """Create an iterator with the worker processes of the way."""
        self.note(iterator=True)
        if self.job.way.workers and multiprocessing.get_start_method(allow_none=True) is None:
            # The script has not asked for workers, and may run as a whole in those that import it, outside of this
            # way's folder: with the default of Python 3.14, it would.
            multiprocessing.set_start_method("fork")
        original(built, *args, **{**options, "num_workers": self.job.way.workers})

    def build_trainer(self, original: Call, trainer: Trainer, *args: Any, **options: Any) -> None:
        """Create a trainer whose files are not those of the user's run."""
        original(trainer, *args, **options)
        self.trainers += 1
        self.trainer = trainer

    def run_trainer(self, original: Call, trainer: Trainer, *args: Any, **options: Any) -> None:
        """Run a trainer in a folder of this job's way; resume there if this process is the second."""
        job = self.job
        trainer.out = Path(job.folder, f"out-{job.way.name}-{self.trainers}")
        if job.dies_at or job.resumes_at:
            self.snapshot = _snapshot_at(trainer, job.dies_at or job.resumes_at)
        if job.resumes_at:
            args, options = (), {**options, "resume": "auto"}
        original(trainer, *args, **options)

    def save(self, original: Call, updater: Any, path: str | Path) -> None:
        """Write a snapshot of the script to a folder of this job's way."""
        original(updater, self._of_this_way(path))

    def restore(self, original: Call, updater: Any, path: str | Path, *args: Any, **options: Any) -> Any:
        """Restore a snapshot that the script has written in this way, or else note one of an earlier run."""
        own = self._of_this_way(path)
        if not own.exists():
            self.note(restored={str(path): True})
        return original(updater, own if own.exists() else path, *args, **options)

    def _of_this_way(self, path: str | Path) -> Path:
        """Return the path in this job's way for one of the script."""
        part = "resumed" if self.job.resumes_at else "saved"
        return Path(self.job.folder, f"{part}-{self.job.way.name}", *Path(path).absolute().parts[1:])

    def update(self, original: Call, updater: ParallelUpdater) -> Any:
        """Run an update and record it."""
        recorder, job = self.recorder, self.job
        if self.trainer is None and (job.dies_at or job.resumes_at):
            self._save_or_resume(updater)
        recorder.count(updater, updater.iteration)
        self.dying = bool(job.dies_at) and updater.iteration == job.dies_at
        if self.dying and self.snapshot is not None:
            # A thread writes the snapshot of the last update.
            self.snapshot.wait()
        LOCAL.owner = updater
        models, optimizers = updater.get_all_models(), updater.get_all_optimizers()
        self.note(parameters={str(recorder.source(updater)): describe_parameters(models, optimizers.values())})
        if len(models) == 1:
            self.models |= {id(model): model for model in models.values()}
        if not recorder.inside:
            # What was computed between two updates, such as an evaluation, is not a part of this one.
            recorder.take_shards()
        with temporarily(recorder, inside=recorder.inside + 1):
            result = original(updater)
        training = updater._training  # noqa: SLF001 - the state of all updaters under its names
        if training.mode_was_changed:
            self.note(was_in_evaluation=True)
        rates = _rates(training.optimizers.values())
        recorder.update(updater, "updater", training.tensors(), result.loss, rates=rates)
        return result

    def _save_or_resume(self, updater: ParallelUpdater) -> None:
        """Save the state of an updater without a trainer, or load it."""
        path = Path(self.job.folder, STATE)
        if self.job.dies_at and updater.iteration == self.job.dies_at:
            torch.save(updater.state_dict(), path)
        elif self.job.resumes_at and not self.resumed:
            self.resumed = True
            updater.load_state_dict(torch.load(path, weights_only=False))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Note what computes in an evaluation as it does in training."""
        with TrainingCalls() as found:
            yield
        self.note_alive(found.calls)

    def before_call(self, module: nn.Module, _: Any) -> None:
        """Note a model that is called in training mode for an evaluation, without gradients and outside of updates."""
        is_outside = LOCAL.shard is None and not self.recorder.inside and not torch.is_grad_enabled()
        if is_outside and module.training and id(module) in self.models and len(self.models) == 1:
            self.note_alive([f"{type(module).__name__} in training mode at {users_line()}"])

    def note_alive(self, calls: Iterable[str]) -> None:
        """Note calls that compute in an evaluation as in training."""
        for call in calls:
            self.note(evaluation={call: True})

    def run_shards(self, original: Call, runner: ShardRunner, work: Any, task: Any, streams: ShardStreams) -> None:
        """Run shards, and record each."""
        LOCAL.streams = streams
        original(runner, work, ObservedTask(task, self, task.phase), streams)

    def pop_gradients(self, original: Call, runner: ShardRunner) -> Any:
        """Remove the gradients of a replica, and record those of a shard."""
        gradients = original(runner)
        shard = LOCAL.shard
        if shard is not None and not LOCAL.experiment and any(gradient is not None for gradient in gradients):
            self.recorder.shard(*shard, gradients=of_parameters(runner.replica, runner.parameters, gradients))
        return gradients

    def run_streams(self, original: Call, streams: ShardStreams, *args: Any, **options: Any) -> Any:
        """Count the computations of an update."""
        self.recorder.computation += 1
        return original(streams, *args, **options)

    def is_target(self, computation: int | None, shard: int | None) -> bool:
        """Whether a shard, or with None the step, is what to look at more closely."""
        target = self.job.target
        if target is None or (target.computation, target.shard) != (computation, shard):
            return False
        return self.recorder.updates_of(target.source) + 1 == target.update

    @contextmanager
    def modes(self, *, log: bool) -> Iterator[OperatorLog | None]:
        """Fill fresh memory if the way does, and log operators if asked to; yield the log."""
        fills = self.job.way.fills
        memory = FreshMemory() if fills else nullcontext()
        with memory, OperatorLog(nan if fills else None) if log else nullcontext() as made:
            yield made

    def write_trace(self, log: OperatorLog | None, kind: Callable[[], str]) -> None:
        """Write what a shard or step has called, and with the first way what it depends on.

        Args:
            log: The operators.
            kind: Makes the experiments.
        """
        found = kind() if self.job.way == REFERENCE else ""
        self.recorder.write({"trace": {"calls": [] if log is None else log.calls, "kind": found}})

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Prepare the step of an optimizer."""
        if LOCAL.experiment:
            return
        is_target = self.is_target(None, None)
        kind = kind_of_step(optimizer) if is_target and self.job.way == REFERENCE else ""
        LOCAL.modes = stack = ExitStack()
        log = stack.enter_context(self.modes(log=is_target))
        if is_target:
            stack.callback(lambda: self.write_trace(log, lambda: kind))

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the step of an optimizer that no updater calls."""
        if LOCAL.experiment:
            return
        if LOCAL.modes is not None:
            LOCAL.modes.close()
            LOCAL.modes = None
        if self.recorder.inside:
            return
        found: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.recorder.names.get(id(parameter), f"parameter {len(found)}")
                found[name] = parameter
                state: dict[str, Any] = dict.get(optimizer.state, parameter, {})
                found |= {f"{key} of {name}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
        self.optimizers[id(optimizer)] = optimizer
        named = {type(model).__name__: model for model in self.models.values()}
        self.note(parameters={LOOP: describe_parameters(named, self.optimizers.values())})
        self.recorder.update(optimizer, "optimizer", found, rates=_rates([optimizer]))


def _rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """Return the learning rates of all groups of parameters."""
    return [float(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group]


def _enter_module(module: nn.Module, _: Any) -> None:
    """Remember which module runs."""
    LOCAL.modules = (*LOCAL.modules, f"a {type(module).__name__}")


def _leave_module(*_: Any) -> None:
    """Forget the module that has run."""
    LOCAL.modules = LOCAL.modules[:-1]


def _run_in_turn(original: Call, replicas: ReplicaSet, work: Callable[[int], None], **options: Any) -> None:
    """Run the work of all devices one after another."""
    original(replicas, work, **{**options, "parallel": False})


def _work_reversed(original: Call, replicas: ReplicaSet, work: Callable[[int], None], place: int, at: Any) -> None:
    """Run the work of the last device first."""
    original(replicas, work, len(replicas.devices) - 1 - place, at)


def _snapshot_at(trainer: Trainer, update: int) -> Snapshot:
    """Change a trainer so that it writes a snapshot at one update only; return the extension."""
    entries = trainer._entries  # noqa: SLF001 - a trainer has no way to move a trigger
    held = [name for name, entry in entries.items() if isinstance(entry.extension, Snapshot)]
    for name in held:
        entry = entries.pop(name)
        trainer._order.remove(entry)  # noqa: SLF001 - as above
    snapshot = Snapshot()
    trainer.extend(snapshot, name=held[0] if held else "Snapshot", trigger=(update, "iteration"))
    return snapshot
