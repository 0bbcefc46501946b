"""Copies of one model on several devices of this process, each of which works in a thread of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from lockstep import plan
from lockstep.arguments import check_instance
from lockstep.errors import OrderError, warn
from lockstep.replicas.pool.copies import ModelChangeDetector, copy_model, hidden_parameters, refuse_wrapped
from lockstep.replicas.pool.deterministic import warn_of_kernels
from lockstep.replicas.pool.devices import NULL_CONTEXT, Devices, device_context, parse_devices
from lockstep.replicas.pool.progress import DeviceProgress
from lockstep.replicas.pool.settings import (
    REFUSING_CACHE,
    ComputeMode,
    ThreadSettings,
    inherited,
    serialize_forward_mode,
    warn_of_kept,
)
from lockstep.replicas.pool.worker import Timeout, Worker, keep_freed_memory, seconds_of


class ParameterCopier:
    """A copier of the parameters of a model to the replicas that do not share their memory.

    Whether a parameter has changed cannot be found out without reading it: a fused optimizer, a write to
    ``parameter.data`` and a custom operator do not increment its version counter. All values are therefore copied every
    time. The version counters of the copies change only if those of the model have changed. A copy of values that are
    already there must not invalidate the graph of an earlier forward, and a write that autograd would reject for the
    model must be rejected for its replicas too.

    Args:
        parameters: The parameters of the model.
        replicas: For each replica the copies of these parameters, in the same order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[Sequence[nn.Parameter]]) -> None:
        self._pairs = [
            (copied, parameter)
            for replica in replicas
            for copied, parameter in zip(replica, parameters, strict=True)
            # By address: whether a replica shares memory is decided when it is created.
            if copied.device != parameter.device or copied.data_ptr() != parameter.data_ptr()
        ]
        self.has_copies = bool(self._pairs)
        """Whether there is a replica with memory of its own."""
        self._versions = self._current_versions()

    @torch.no_grad()
    def copy(self) -> None:
        """Copy all values."""
        if self._pairs:
            copies, originals = zip(*self._pairs, strict=True)
            # Unlike `detach`, `data` has a version counter of its own, so those of the copies do not change.
            torch._foreach_copy_([copied.data for copied in copies], originals)
            self.count_writes()

    def count_writes(self) -> None:
        """Increment the version counters of the copies whose originals have been written to."""
        versions = self._current_versions()
        if versions != self._versions:
            torch.autograd.graph.increment_version(
                [
                    copied
                    for (copied, _), before, now in zip(self._pairs, self._versions, versions, strict=True)
                    if before != now
                ]
            )
            self._versions = versions

    def _current_versions(self) -> list[int]:
        return [original._version for _, original in self._pairs]


class ReplicaSet:
    """Copies of one model on several devices, each with a persistent worker thread.

    A replica on the device where the model lives shares the memory of its parameters. A replica on another device holds
    a copy, which receives all values before every use, no matter how they were written. The model itself is never run.
    The first replica works in the calling thread and every other one in a thread of its own, under the settings of the
    caller (grad mode, autocast, default dtype and device, denormals), in a copy of its `contextvars.Context`, and with
    one intra-op thread. If the caller is inside of something that other threads cannot be given (a `TorchFunctionMode`,
    a `TorchDispatchMode`, `saved_tensors_hooks`, a transform of `torch.func`), all replicas work in the calling thread,
    one after another and without a timeout, and a warning says so. If there is a CPU device under Linux, the process
    keeps the memory that it frees from the first use on, unless environment variables configure this (see
    `replicas.pool.worker.keep_freed_memory`).

    Args:
        model: The model. It stays where it is, so call ``model.to(devices[0])`` first to train it on a GPU.
        devices: ``"auto"`` for this rank's GPUs, or else its cores; a number of devices; or names, which may repeat.
        workloads: The relative speeds of the devices, by which shards are assigned. They are equal by default.
        timeout: The number of seconds, above 0, after which a device that is still at work counts as hung. The first
            device then has a thread of its own too, even if devices work one after another. ``"auto"`` is half an hour
            for the threads of the other devices, counted from when the calling thread has finished its own share, which
            is not watched; this costs nothing. None waits without limit.

    Raises:
        ValueError: If a device, a workload or the timeout is out of range, or a parameter has no shape yet.
        TypeError: If the model cannot be copied or is spread over devices or processes already, or the timeout is not a
            number.

    Example:
        >>> with ReplicaSet(nn.Linear(2, 1), devices=["cpu", "cpu"]) as replicas:
        ...     replicas.run(lambda place: replicas.replicas[place].weight.data.add_(1.0) if place == 0 else None)
        ...     torch.equal(replicas.replicas[0].weight, replicas.replicas[1].weight)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Devices = "auto",
        *,
        workloads: Sequence[float] | None = None,
        timeout: Timeout = "auto",
    ) -> None:
        check_instance("model", model, nn.Module, "a torch.nn.Module")
        refuse_wrapped(model, "model")
        self.model = model
        self.devices = parse_devices(devices)
        workloads = [1.0] * len(self.devices) if workloads is None else workloads
        plan.check_workloads(workloads)
        self.workloads = list(workloads)
        if len(self.workloads) != len(self.devices):
            raise ValueError(
                f"`workloads` must hold one number per device ({len(self.devices)}), got {len(self.workloads)}."
            )
        self.device_types = sorted({device.type for device in self.devices})
        self.accelerators = [device for device in dict.fromkeys(self.devices) if device.type != "cpu"]
        """The devices other than CPUs, each one once."""
        if "cuda" in self.device_types:
            warn_of_kernels(os.environ)
        if len(self.device_types) > 1:
            warn(
                f"`devices` are of several types ({', '.join(self.device_types)}), whose kernels round differently, so "
                "the determinism guarantee is suspended: the bits depend on which device computes a shard. Autocast "
                "also casts other operations on each type."
            )
        self._seconds = seconds_of(timeout)
        self.watches_all = timeout is not None and timeout != "auto"
        """Whether a device counts as hung after a time that was given."""
        self.uses_threads = len(self.devices) > 1 or self.watches_all
        """Whether work may run in other threads, which need the settings of the caller."""
        places = range(len(self.devices))
        self._place_ranges = [places[place : place + 1] for place in places]
        self.frozen: frozenset[str] = frozenset()
        """The names of parameters that require no gradient on the replicas, even if they do in the model."""
        self.progress = DeviceProgress(self.devices)
        """What the devices are doing."""
        self._replicas: list[nn.Module] = []
        self._changes: ModelChangeDetector | None = None
        self._copier = ParameterCopier([], [])
        self._workers: list[Worker] = []
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> ReplicaSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def replicas(self) -> list[nn.Module]:
        """The copies, one per device, which are created on first use and again after the model has changed."""
        self.refresh()
        return self._replicas

    @property
    def stopping(self) -> bool:
        """Whether another replica has failed or the user asked to stop. Long work should check this regularly."""
        return self.progress.stopping

    def wants_threads(self, work: Iterable[Sized]) -> bool:
        """Return whether work should run in threads that draw from streams of their own.

        It should if several devices have work. It also should if all threads are watched, because an abandoned thread
        may come back and draw while another one computes.

        Args:
            work: The work of each device.
        """
        return self.watches_all or sum(map(bool, work)) > 1

    def stop(self) -> None:
        """Ask every replica to stop because of an interrupt, and record which devices are at work."""
        self.progress.halt()
        self.progress.mark()

    def refresh(self) -> bool:
        """Update the replicas to the model: its structure, attributes, hooks and values.

        Returns:
            Whether the replicas were created anew.

        Raises:
            OrderError: If the set is closed, or was created before this process was forked.
        """
        if self._closed or self._process != os.getpid():
            raise self._unusable_error()
        if self._changes is not None and self._changes.computed:
            self._changes.compute_weights()
        if self._changes is None or self._changes.changed():
            if "cpu" in self.device_types:
                keep_freed_memory()
            # Tensors that are created in inference mode could not be trained later.
            with torch.inference_mode(mode=False):
                memos: list[dict[int, Any]] = [{} for _ in self.devices]
                self._replicas = [self._copy(place, memo) for place, memo in enumerate(memos)]
            # The detector comes last: if a copy fails, the next call starts over.
            parameters = [*self.model.parameters(), *hidden_parameters(self.model)]
            self._copier = ParameterCopier(parameters, [[memo[id(each)] for each in parameters] for memo in memos])
            self._changes = ModelChangeDetector(self.model, copied=self._copier.has_copies, memo=memos[0])
            return True
        if self._copier.has_copies:
            self.sync_parameters()
        return False

    def _shares_memory(self, place: int, parameter: torch.Tensor) -> bool:
        """Return whether the replica of a device uses the memory of a parameter of the model itself.

        Args:
            place: The index of the device.
            parameter: A parameter of the model.
        """
        return parameter.is_meta or parameter.device == self.devices[place]

    def new_replica(self, place: int) -> nn.Module:
        """Return another copy of the model for a device, as if the model had changed.

        Args:
            place: The index of the device.
        """
        with torch.inference_mode(mode=False):
            return self._copy(place, {})

    def _copy(self, place: int, memo: dict[int, Any]) -> nn.Module:
        """Copy the model for one device and freeze the parameters that are to be frozen."""
        replica = copy_model(self.model, self.devices[place], partial(self._shares_memory, place), memo)
        for name, parameter in replica.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        return replica

    def sync_parameters(self) -> None:
        """Copy the parameters of the model to replicas with memory of their own, which `refresh` does each time."""
        self._copier.copy()

    def sync_for_backward(self) -> None:
        """Copy the parameters of the model to the replicas before a backward, unless they were moved to other memory.

        The graph of a forward refers to the parameters of the replicas. On every device alike, a backward therefore
        sees what was written to the model in the meantime, or raises if autograd has counted the write. If a parameter
        was given other memory (``parameter.data = ...``), an existing graph keeps the old memory.
        """
        if self._copier.has_copies and self._changes is not None and self._changes.fits():
            self.sync_parameters()

    def run(
        self,
        work: Callable[[int], None],
        *,
        settings: ThreadSettings | None = None,
        parallel: bool = True,
        waiting: AbstractContextManager[None] = NULL_CONTEXT,
    ) -> None:
        """Run one piece of work on every replica, and return when all of them have finished.

        Args:
            work: The function to call with the index of each device. Long work should check `stopping`.
            settings: The settings under which all threads compute, if the calling thread is in that state already. By
                default the settings of the calling thread are captured.
            parallel: Whether to run in the threads of the devices at the same time instead of one device after another.
            waiting: A context manager to enter while the calling thread waits for the others.

        Raises:
            OrderError: If the set is closed, or was created before this process was forked.
            ReplicaError: If a device is still at work after the timeout.
            ReplicaInterrupt: If the calling thread was interrupted.
            BaseException: The error of the first device (by index) that failed. The devices after it were asked to
                stop; those before it went on, because one of their shards may fail too.
        """
        if self._closed or self._process != os.getpid():
            raise self._unusable_error()
        if settings is None:
            with ComputeMode(ThreadSettings.capture(self.device_types, self.accelerators)) as taken:
                self.run(work, settings=taken, parallel=parallel, waiting=waiting)
            return
        self.progress = progress = DeviceProgress(self.devices)
        try:
            in_threads = self.watches_all or (parallel and len(self.devices) > 1)
            if in_threads and settings.kept:
                warn_of_kept(settings.kept)
                in_threads = False
            if in_threads:
                parametrize._cache = REFUSING_CACHE if len(self.devices) > 1 else {}  # noqa: SLF001 - no public way
                try:
                    self._run_in_threads(work, settings, parallel, waiting)
                finally:
                    parametrize._cache = {}  # noqa: SLF001 - as above
            else:
                for place in range(len(self.devices)):
                    self._work(work, place, progress)
        except KeyboardInterrupt:
            # The modes of a replica may have been switched only in part, so none of them can be used again.
            self._abandon()
            with progress:
                raise

    def _run_in_threads(
        self,
        work: Callable[[int], None],
        settings: ThreadSettings,
        parallel: bool,
        waiting: AbstractContextManager[None],
    ) -> None:
        """Run work in threads, where the first device uses the calling thread unless all devices are watched.

        After an interrupt or a timeout, no thread stays in use.
        """
        progress = self.progress
        runs = self._place_ranges if parallel else [range(len(self.devices))]
        thread_runs = runs if self.watches_all else runs[1:]
        # So far one thread may have worked for all devices in turn, so more may be missing.
        for run in thread_runs[len(self._workers) :]:
            serialize_forward_mode()
            self._workers.append(Worker(f"lockstep-{run[0]}-{self.devices[run[0]]}"))
        workers = self._workers[: len(thread_runs)]
        errors: list[BaseException | None] = []
        try:
            for run, worker in zip(thread_runs, workers, strict=True):
                # A copy for each thread, because a context can be entered once at a time.
                worker.submit(partial(copy_context().run, self._work_under, settings, work, run, progress))
            if not self.watches_all:
                try:
                    self._work(work, 0, progress)
                except BaseException as error:  # noqa: BLE001 - raised once all threads have ended
                    errors.append(error)
            # Interrupts are let in for the wait, but not while threads are started, where one could be lost halfway.
            with waiting:
                errors += self._wait(thread_runs, workers)
        except BaseException as error:
            # Of the first device, so that none goes on.
            progress.record_failure(0, error)
            self._abandon()
            raise
        # In the order of devices, so that the same error is raised no matter which thread failed first.
        raised = next(filter(None, errors), None)
        if raised is not None:
            try:
                raise raised
            finally:
                # The error refers to this frame, and a cycle would keep the graphs of its shard.
                del raised, errors

    def _work_under(
        self, settings: ThreadSettings, work: Callable[[int], None], places: range, progress: DeviceProgress
    ) -> None:
        """Run the work of some devices in a worker thread, under the settings of the thread that requested it."""
        for place in places:
            with inherited(settings):
                self._work(work, place, progress)

    def _work(self, work: Callable[[int], None], place: int, progress: DeviceProgress) -> None:
        """Run the work of one device in the calling thread.

        Args:
            work: The function to call with the index of the device.
            place: The index of the device.
            progress: The progress to record in. It is passed instead of read from the object, because a thread that was
                abandoned and comes back must not touch the records of later work.
        """
        device = self.devices[place]
        progress.start(place)
        try:
            with NULL_CONTEXT if device.type == "cpu" else device_context(device):
                work(place)
        except BaseException as error:
            progress.record_failure(place, error)
            raise
        progress.finish(place)

    def _wait(self, runs: Sequence[range], workers: Sequence[Worker]) -> list[BaseException | None]:
        """Wait for threads, and return the error of each or None."""
        # One deadline for all threads, so that the timeout does not multiply with the number of devices.
        end = time.monotonic() + self._seconds
        errors: list[BaseException | None] = []
        late: list[int] = []
        for run, worker in zip(runs, workers, strict=True):
            try:
                errors.append(worker.wait(end - time.monotonic()))
            except TimeoutError:
                late += run
        if late:
            raise self.progress.timeout_error(late, self._seconds)
        return errors

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that created the set, and so does not have its threads."""
        return self._process != os.getpid()

    def _unusable_error(self) -> OrderError:
        """Return the error for the use of a closed set, or of a set created before a fork."""
        if self.is_forked:
            return fork_error(type(self).__name__)
        return OrderError(f"A closed {type(self).__name__} cannot be used. Create a new one.")

    def _abandon(self) -> None:
        """Drop threads and replicas. A thread that is still at work ends after that work."""
        # Abandoned threads read this when they come back, and skip the rest of their work.
        self.progress.halt()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._replicas = []
        self._copier = ParameterCopier([], [])
        self._changes = None

    def release(self) -> None:
        """Drop threads and replicas until they are needed again. The model is left as it is.

        A thread that is still at work after an interrupt ends after that work.
        """
        self._abandon()

    def close(self) -> None:
        """Drop threads and replicas for good. Closing twice is allowed."""
        self.release()
        self._closed = True


def fork_error(name: str) -> OrderError:
    """Return the error for the use of an object in a process that was forked after it was created.

    Args:
        name: The name of the class of the object.
    """
    return OrderError(
        f"A {name} cannot be used in a process forked from the one that created it, because threads and connections do "
        "not survive a fork. Create it in the new process, or start that process with multiprocessing's 'spawn' or "
        "with lockstep.launch."
    )
