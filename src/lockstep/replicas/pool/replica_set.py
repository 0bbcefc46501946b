"""Copies of one model on several devices of this process, each with a thread of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Final, Literal, TypeAlias

import torch
from torch import nn

from lockstep import plan
from lockstep.errors import OrderError
from lockstep.replicas.pool.copies import ModelWatch, copy_model
from lockstep.replicas.pool.devices import Devices, device_context, parse_devices
from lockstep.replicas.pool.progress import DeviceProgress
from lockstep.replicas.pool.sending import Sending
from lockstep.replicas.pool.settings import ComputeMode, InheritedSettings, ThreadSettings
from lockstep.replicas.pool.worker import Worker, keep_freed_memory
from lockstep.replicas.pool.wrapped import refuse_wrapped

Timeout: TypeAlias = "float | Literal['auto'] | None"
"""Seconds after which a device counts as hung; "auto" watches the threads of all but the first."""

PATIENCE: Final = 1800.0
"""Seconds that "auto" waits for a thread, as torch's own DistributedDataParallel waits for a process."""

AT_ONCE: Final = nullcontext()


class ReplicaSet:
    """Copies of one model on several devices, with a persistent worker thread each.

    A replica on the device where the model lives shares the memory of its parameters; one elsewhere
    holds a copy, which receives all values before every use, however they were written. The model itself
    is never run. The first replica works in the calling thread, every other one in its own, under the
    caller's settings (grad mode, autocast, default dtype and device, denormals) and one intra-op thread. On
    CPUs under Linux the process keeps the memory it frees from the first work on, unless the environment says
    otherwise; see `replicas.memory`.

    Args:
        model: Stays where it is; ``model.to(devices[0])`` first where it shall be trained on a GPU.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed.
        workloads: Relative speeds of the devices, by which shards are assigned; equal ones by default.
        frozen: Names of parameters that ask for no gradient on the replicas, whatever they do in the model.
        timeout: Seconds, above 0, after which devices still at work count as hung; the first device then has
            a thread of its own too, also where devices work one after another. ``"auto"``: half an hour for
            the threads of the other devices, from when the calling thread has done its own share, which
            is not watched; costs nothing. None waits without end.

    Raises:
        ValueError: A device, a workload or the timeout is not what it must be, or a parameter has no shape
            yet.
        TypeError: The model cannot be copied or is spread over devices or processes already, or the timeout is
            no number.

    Example:
        >>> with ReplicaSet(nn.Linear(2, 1), devices=["cpu", "cpu"]) as group:
        ...     group.run(lambda place: group.replicas[place].weight.data.add_(1.0) if place == 0 else None)
        ...     torch.equal(group.replicas[0].weight, group.replicas[1].weight)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Devices = "auto",
        *,
        workloads: Sequence[float] | None = None,
        frozen: Collection[str] = (),
        timeout: Timeout = "auto",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
        refuse_wrapped(model, "model")
        self.model = model
        self.devices = parse_devices(devices)
        self.workloads = list(workloads) if workloads is not None else [1.0] * len(self.devices)
        plan.check_workloads(self.workloads)
        if len(self.workloads) != len(self.devices):
            raise ValueError(
                f"`workloads` must hold one number a device ({len(self.devices)}), got {len(self.workloads)}."
            )
        self.device_types = sorted({device.type for device in self.devices})
        self._seconds = _check_timeout(timeout)
        self._watches_all = timeout is not None and timeout != "auto"
        self.carries = len(self.devices) > 1 or self._watches_all
        """Whether work may be done in other threads, which have to know the caller's settings."""
        places = range(len(self.devices))
        self._one_by_one = [places[place : place + 1] for place in places]
        self.frozen = frozenset(frozen)
        """Names of what requires no gradient on the replicas."""
        self.progress = DeviceProgress(self.devices)
        """What the devices are doing."""
        self._replicas: list[nn.Module] = []
        self._watch: ModelWatch | None = None
        self._sending = Sending([], [])
        self._workers: list[Worker] = []
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> ReplicaSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def replicas(self) -> list[nn.Module]:
        """The copies, one a device; built when first asked for, and again when the model has changed."""
        self.refresh()
        return self._replicas

    @property
    def stopping(self) -> bool:
        """Whether another replica has failed or the user asked to stop; long work looks between its parts."""
        return self.progress.stopping

    def wants_threads(self, work: Iterable[Sized]) -> bool:
        """Tell whether work is for threads that draw from streams of their own.

        It is where several devices have some; and where all are watched, for a thread that is left behind may
        come back and draw while another computes.

        Args:
            work: Of each device.
        """
        return self._watches_all or sum(map(bool, work)) > 1

    def stop(self) -> None:
        """Ask every replica to end its work at the next look; an interrupt came just now."""
        self.progress.stopping = True
        self.progress.mark()

    def refresh(self) -> bool:
        """Make the replicas follow the model: its structure, attributes, hooks and values.

        Returns:
            Whether the replicas were built anew.

        Raises:
            OrderError: The group is closed, or was built before this process was forked.
        """
        if self._closed or self._process != os.getpid():
            raise self._is_of_no_use()
        if self._watch is None or self._watch.changed() or (self._sending.is_needed and not self._sending.fits()):
            if "cpu" in self.device_types:
                keep_freed_memory()
            # Made in inference mode, the copies could not be trained later.
            with torch.inference_mode(mode=False):
                self._replicas = [self._copy(place) for place in range(len(self.devices))]
            self._sending = Sending(list(self.model.parameters()), self._replicas)
            self._watch = ModelWatch(self.model)
            return True
        if self._sending.is_needed:
            self.sync_parameters()
        return False

    def _shares_memory(self, place: int, parameter: torch.Tensor) -> bool:
        """Return whether the replica at a place computes with the memory of a parameter of the model itself.

        Args:
            place: The number of the replica's device.
            parameter: One of the model's.
        """
        return parameter.is_meta or parameter.device == self.devices[place]

    def _copy(self, place: int) -> nn.Module:
        """Copy the model for one place, with what is frozen."""
        replica = copy_model(self.model, self.devices[place], partial(self._shares_memory, place))
        for name, parameter in replica.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        return replica

    def sync_parameters(self) -> None:
        """Copy the model's parameters to replicas with memory of their own; `refresh` does it every time."""
        self._sending.send()

    def sync_for_backward(self) -> None:
        """Copy the model's parameters as `sync_parameters` does, unless they have been moved to other memory.

        The graph of a forward refers to the replicas' parameters. So a backward finds what was written to the
        model since then, on every device alike, or raises if autograd has counted the write. Parameters that
        were given other memory (``parameter.data = ...``) leave a graph that exists with the old one.
        """
        if self._sending.is_needed and self._sending.fits():
            self.sync_parameters()

    def run(
        self,
        work: Callable[[int], None],
        *,
        settings: ThreadSettings | None = None,
        at_once: bool = True,
        waiting: AbstractContextManager[None] = AT_ONCE,
    ) -> None:
        """Do one piece of work on every replica, and come back when all have ended.

        Args:
            work: Called with the index of each device; long work should look at `stopping`.
            settings: What all threads compute under, if the calling thread is in that state already; by
                default its own are taken.
            at_once: In the devices' threads; else one after another.
            waiting: Entered where the calling thread waits for the others.

        Raises:
            OrderError: The group is closed, or was built before this process was forked.
            ReplicaError: A device is still at work after the timeout.
            ReplicaInterrupt: The calling thread was interrupted.
            BaseException: What the first device (by index) that failed raised; the others were asked to stop.
        """
        if self._closed or self._process != os.getpid():
            raise self._is_of_no_use()
        if settings is None:
            with ComputeMode(ThreadSettings.capture(self.device_types)) as taken:
                self.run(work, settings=taken, at_once=at_once, waiting=waiting)
            return
        self.progress = progress = DeviceProgress(self.devices)
        try:
            if self._watches_all or (at_once and len(self.devices) > 1):
                self._run_in_threads(work, settings, at_once, waiting)
            else:
                for place in range(len(self.devices)):
                    self._do(work, place, progress)
        except KeyboardInterrupt as error:
            self._abandon()  # a replica may be half switched to another mode
            interrupt = progress.interrupt(error)
            if interrupt is None:
                raise
            raise interrupt from error

    def _run_in_threads(
        self,
        work: Callable[[int], None],
        settings: ThreadSettings,
        at_once: bool,
        waiting: AbstractContextManager[None],
    ) -> None:
        """Work in threads, and for the first device in this one unless all are watched.

        After an interrupt or a timeout no thread stays in use.
        """
        progress = self.progress
        runs = self._one_by_one if at_once else [range(len(self.devices))]
        theirs = runs if self._watches_all else runs[1:]
        # Where devices worked one after another so far, one thread did it all.
        for run in theirs[len(self._workers) :]:
            self._workers.append(Worker(f"lockstep-{run[0]}-{self.devices[run[0]]}"))
        workers = self._workers[: len(theirs)]
        errors: list[BaseException | None] = []
        try:
            for run, worker in zip(theirs, workers, strict=True):
                worker.begin(partial(self._do_under, settings, work, run, progress))
            if not self._watches_all:
                try:
                    self._do(work, 0, progress)
                except BaseException as error:  # noqa: BLE001 - raised once all threads have ended
                    errors.append(error)
            with waiting:
                errors += self._wait(theirs, workers)
        except BaseException as error:
            progress.failed(error)
            self._abandon()
            raise
        for raised in errors:
            if raised is not None:
                raise raised

    def _do_under(
        self, settings: ThreadSettings, work: Callable[[int], None], places: range, progress: DeviceProgress
    ) -> None:
        """Do the work of some devices in another thread than the one that asked for it."""
        for place in places:
            with InheritedSettings(settings):
                self._do(work, place, progress)

    def _do(self, work: Callable[[int], None], place: int, progress: DeviceProgress) -> None:
        """Do one device's work in the calling thread.

        Args:
            work: Called with the device's number.
            place: That number.
            progress: Where this piece of work is noted. A thread that was given up and comes back must not
                touch the notes of later work, so it is not looked up here.
        """
        device = self.devices[place]
        progress.begin(place)
        try:
            with AT_ONCE if device.type == "cpu" else device_context(device):
                work(place)
        except BaseException as error:
            progress.failed(error)
            raise
        progress.end(place)

    def _wait(self, runs: Sequence[range], workers: Sequence[Worker]) -> list[BaseException | None]:
        """Wait for threads, and give what each raised."""
        end = time.monotonic() + self._seconds
        errors: list[BaseException | None] = []
        late: list[int] = []
        for run, worker in zip(runs, workers, strict=True):
            try:
                errors.append(worker.wait(end - time.monotonic()))
            except TimeoutError:
                late += run
        if late:
            raise self.progress.hung(late, self._seconds)
        return errors

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that built the group, whose threads it does not have."""
        return self._process != os.getpid()

    def _is_of_no_use(self) -> OrderError:
        """Return the error for work that is asked of a closed group, or of one built in another process."""
        if self.is_forked:
            return forked(type(self).__name__)
        return OrderError(f"A closed {type(self).__name__} cannot work; build a new one.")

    def _abandon(self) -> None:
        """Let go of threads and replicas; a thread that is still at work ends by itself after that work."""
        self.progress.stopping = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._replicas = []
        self._sending = Sending([], [])
        self._watch = None

    def release(self) -> None:
        """Let go of threads and replicas until they are needed again; the model is left as it is.

        A thread that is still at work after an interrupt ends by itself after that work.
        """
        self._abandon()

    def close(self) -> None:
        """Let go of threads and replicas for good. Closing twice is allowed."""
        self.release()
        self._closed = True


def forked(what: str) -> OrderError:
    """Return the error for something that a forked process cannot use.

    Args:
        what: The name of its class.
    """
    return OrderError(
        f"A {what} cannot be used in a process forked from the one that built it: threads and connections do not "
        "survive a fork. Build it in the new process, or start that with multiprocessing's 'spawn' or lockstep.launch."
    )


def _check_timeout(timeout: Timeout) -> float:
    """Give the seconds to wait."""
    if timeout is None:
        return math.inf
    if timeout == "auto":
        return PATIENCE
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f'`timeout` must be a number of seconds, "auto" or None, got {timeout!r}.')
    if not timeout > 0:
        raise ValueError(f"`timeout` must be above 0 seconds, got {timeout}.")
    return timeout
