"""Shards of an audited attempt, computed again: in another place, and beside each other.

Where there is no other place, they are computed as it would: in another thread, with other numbers in fresh memory, and
without caches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, partial
from typing import Any, Final, TypeAlias

import torch

from lockstep.errors import DeterminismWarning, OrderError, few, is_memory_error, warn
from lockstep.nest import map_tensors
from lockstep.plan import Shard
from lockstep.precision import copy_to_device
from lockstep.replicas import (
    FreshMemory,
    ReplicaSet,
    ShardStreams,
    ThreadSettings,
    Turns,
    inherited,
    is_memory_limited,
    refusing_writes,
)
from lockstep.state import temporarily
from lockstep.tree import Tensors
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.attempt.audit import NEW_COPY, Audit, Seals, seals_of
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.prepared_model import PreparedModel
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.detectors import defining_modules
from lockstep.updaters.result import ShardReport
from lockstep.updaters.setup.batches import Conversion, copied, may_draw
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.carried import CarriedAttempt
from lockstep.updaters.state.training import TrainingState
from lockstep.updaters.step.originals import changed_attributes

LIBRARIES: Final = frozenset({"torch", "lockstep", "builtins"})
"""Packages whose caches hold nothing of a shard."""

UNREPEATABLE: Final = frozenset({None, "gelsy"})
"""Drivers of `torch.linalg.lstsq` on CPUs that start with pivots from memory that torch has not set. No other kernel of
CPUs gives other bits in every call without being known to `torch.use_deterministic_algorithms`."""


class _Watch(FreshMemory):
    """Fills fresh memory, and warns of the function that is known to be not repeatable."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        made = super().__torch_function__(func, types, args, kwargs)
        if func is torch.linalg.lstsq and made.solution.is_cpu and (kwargs or {}).get("driver") in UNREPEATABLE:
            warn(
                "`torch.linalg.lstsq` with the driver 'gelsy', which is the default on CPUs, gives other bits in every "
                "call. The determinism guarantee does not cover it. Pass driver='gels' for matrices of full rank, or "
                "driver='gelsd'.",
                DeterminismWarning,
            )
        return made


def run_as_elsewhere(
    work: Callable[[], None], users: Iterable[object], device: torch.device, *, in_thread: bool
) -> None:
    """Run the work of one shard as another place would, and warn if it raises there.

    Args:
        work: The function to call.
        users: Functions and objects of the user. Cached functions of the modules that define them are called anew.
        device: The device that the work uses.
        in_thread: Whether to run it in a new thread, under the settings of this one. Where the memory of the process is
            limited it runs in this thread all the same: Python waits forever for a thread that gets no memory in its
            first lines.
    """
    accelerators = [] if device.type == "cpu" else [device]
    settings = ThreadSettings.capture([device.type], accelerators, training=True)

    def run() -> None:
        how = "in another thread, " * in_thread + "without caches and with other numbers in uninitialised memory"
        with warning_of_errors(how), inherited(settings), _Watch(), without_caches(users):
            work()

    if not in_thread or settings.kept or is_memory_limited():
        run()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy_context().run, run).result()


@contextmanager
def warning_of_errors(how: str) -> Iterator[None]:
    """Warn of an error of a second computation; the first has raised none, so the update goes on.

    Args:
        how: How the shard is computed once more.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - as above
        # The second computation needs more memory than the first, whose results are still there.
        if not is_memory_error(error):
            warn(
                f"A shard was computed once more, {how}, and raised {type(error).__name__}: {error}. On another device "
                "or rank, or after a resume, it may do so as well. `audit_every=0` leaves this out.",
                DeterminismWarning,
            )


@contextmanager
def without_caches(users: Iterable[object]) -> Iterator[None]:
    """Replace the cached functions of modules by those that they wrap, so that no cache is read, filled or emptied."""
    names = defining_modules(users)
    modules = [sys.modules[name] for name in names if name in sys.modules and name.split(".")[0] not in LIBRARIES]
    with ExitStack() as stack:
        for module in modules:
            cached = {name: each for name, each in vars(module).items() if isinstance(each, _lru_cache_wrapper)}
            wrapped: dict[str, Any] = {name: each.__wrapped__ for name, each in cached.items()}
            stack.enter_context(temporarily(module, **wrapped))
        yield


LEADS: Final = (20, 5, 2, 0)
"""By how many operations one thread is ahead of another, each in turn: what a shard changes for a moment is seen by the
other one if that one is inside of its own change, which may be long or short. The longest comes first, because a
shorter one rather leaves a switch changed, after which nothing differs any more."""

Around: TypeAlias = "Callable[[int, Callable[[], None]], None]"
"""Is called with the index of a device and the work to do on it, in the thread of the device."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Computes shards of an attempt again, and leaves everything else as it is.

    Attributes:
        training: The training state.
        recipe: The recipe of the update.
        replicas: The replicas.
        prepared: The model as prepared for the attempt.
        streams: The random streams of shards.
        conversion: Creates the tensors of shards.
        first_stream: Returns the position of the first random stream of a gradient of the update.
        run_shards: Computes the shards of a device.
        is_first: Whether the update is one of the first, in which there are more checks.
    """

    training: TrainingState
    recipe: Recipe
    replicas: ReplicaSet
    prepared: PreparedModel
    streams: ShardStreams
    conversion: Conversion
    first_stream: Callable[..., int]
    run_shards: Callable[..., None]
    is_first: bool

    def choose_neighbours(self, attempt: Attempt, audit: Audit) -> None:
        """Choose two shards to compute beside each other, in the first updates and where two devices have one.

        Args:
            attempt: The attempt.
            audit: Receives the shards, and copies of tensors that cannot be read again.
        """
        runs = [(place, run) for place, run in enumerate(attempt.share.shards_by_device) if run]
        # Kernels of accelerators may vary.
        varies = self.replicas.accelerators and not torch.are_deterministic_algorithms_enabled()
        if self.is_first and len(runs) > 1 and not (audit.renews or self.streams.one_at_a_time or varies):
            audit.neighbours = {place: run[-1] for place, run in runs[:2]}
        for shard in (audit.shard, *audit.neighbours.values()):
            # Samples that draw would be others if they were read again.
            if may_draw([attempt.batches[shard.batch]]):
                given = (given for run in attempt.device_shards for each, given in run if each is shard)
                audit.given[shard.index] = map_tensors(copied, next(given, None))

    # What an attempt holds must not refer to it: a cycle would keep its gradients until the garbage collector runs.
    def record(self, audit: Audit, share: RankShare, carried: CarriedAttempt | None, *computed: Any) -> None:
        """Keep the checksums of the shards that are compared, and of buffers that shards may disagree on."""
        place = next(at for at, run in enumerate(share.shards_by_device) if computed[0] in run)
        left = self.prepared.runners[place].buffers.left()
        audit.note_buffers(self.prepared.buffer_refs, left, self.recipe.buffers)
        if computed[0].index in audit.compared:
            audit.seals[computed[0].index] = self._seals(carried, place, *computed)

    def _seals(
        self, carried: CarriedAttempt | None, place: int, shard: Shard, gradients: Tensors, report: ShardReport
    ) -> Seals:
        """Return the checksums of what a shard has computed."""
        returned = () if carried is None else carried.returned(shard.samples)
        computed = (*gradients, report.loss, *self.prepared.runners[place].buffers.left(), *returned)
        return seals_of(computed, report.weight)

    def elsewhere(self, attempt: Attempt, audit: Audit, context: UpdateContext, place: int) -> Seals | None:
        """Compute the audited shard on a device of this process; return its checksums, or None if it was left out."""

        def around(_: int, work: Callable[[], None]) -> None:
            if not attempt.gradient_context.at_start:
                with warning_of_errors(f"by {NEW_COPY}") if audit.renews else nullcontext():
                    work()
                return
            users = [attempt.request.loss_fn, *self.replicas.replicas[place].modules()]
            run_as_elsewhere(work, users, self.replicas.devices[place], in_thread=audit.place == audit.other)

        again = self._by_new_replica(audit, place) if audit.renews else self
        return again._run(attempt, audit, context, {place: audit.shard}, around).get(place)  # noqa: SLF001 - of this class

    def _by_new_replica(self, audit: Audit, place: int) -> Recomputation:
        """Return what computes by a new copy of the model on one device, as a run that is resumed here would."""
        replica = self.replicas.new_replica(place)
        audit.left_over = list(map(str, changed_attributes(replica, self.prepared.runners[place].replica)))
        return replace(self, prepared=self.prepared.with_replica(place, replica, self.replicas, self.recipe.buffers))

    def _run(
        self, attempt: Attempt, audit: Audit, context: UpdateContext, shards: Mapping[int, Shard], around: Around
    ) -> dict[int, Seals]:
        """Compute one shard on each of some devices; return the checksums by device."""
        found: dict[int, Seals] = {}
        again = {place: self.tensors_of(attempt, audit, shard, place) for place, shard in shards.items()}
        carried = None if self.training.carried is None else CarriedAttempt(self.training.carried, attempt.sizes)

        def record(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            place = next(place for place, each in shards.items() if each.index == shard.index)
            found[place] = self._seals(carried, place, shard, gradients, report)
            # Of another rank, where each rank has a single one.
            left = self.prepared.runners[place].buffers.left()
            audit.note_buffers(self.prepared.buffer_refs, left, self.recipe.buffers)

        in_audit = replace(attempt.gradient_context, inspect_shard=record, carried=carried)
        tasks: list[DeviceGradientTask | None] = [None] * len(self.replicas.devices)

        def work(place: int) -> None:
            self.replicas.progress.start(place)  # of the thread that this is called in
            self.run_shards(self.prepared, tasks, in_audit, attempt.request, again.get, place)

        def compute(place: int) -> None:
            if place in again:
                around(place, partial(work, place))

        self.run(compute, attempt, context)
        return found

    def run(self, compute: Callable[[int], None], attempt: Attempt, context: UpdateContext) -> None:
        """Call a function with the index of each device, in the threads and with the random streams of an attempt."""
        self.streams.run(
            partial(self.replicas.run, compute, settings=context.settings),
            seed=self.recipe.seed,
            first=self.first_stream(attempt.request.computation),
            parallel=len(self.replicas.devices) > 1,
        )

    def tensors_of(self, attempt: Attempt, audit: Audit, shard: Shard, place: int) -> list[tuple[Shard, Any]]:
        """Return a shard with new tensors on a device."""
        device = self.replicas.devices[place]
        if shard.index not in audit.given:
            return self.conversion.shards(attempt.batches, [[shard]], [device], self.first_stream())[0]
        return [(shard, map_tensors(lambda each: copy_to_device(copied(each), device), audit.given[shard.index]))]

    def side_by_side(self, attempt: Attempt, audit: Audit, context: UpdateContext) -> None:
        """Compute two shards beside each other: after each operation of one the other one continues.

        Raises:
            OrderError: If one of them has other bits then, although a shard that is computed alone has the same ones.
        """
        # Of what differs alone there is a warning. All work stays in one thread, or a new thread may not get memory.
        if audit.differs or context.settings.kept or self.streams.one_at_a_time or is_memory_limited():
            return
        for lead in LEADS if audit.neighbours else ():
            found, cause = self._difference(attempt, audit, context, Turns(list(audit.neighbours), lead))
            if found:
                both = " and ".join(str(each.index) for each in audit.neighbours.values())
                changed = f" Meanwhile this changed: {few(names)}." if (names := audit.moved()) else ""
                raise OrderError(
                    f"Shards {both} of one of the first updates were computed once more, each in the thread of its "
                    f"device and in turn after each operation, and {found}.{changed} {SHARED}"
                ) from cause

    def _difference(
        self, attempt: Attempt, audit: Audit, context: UpdateContext, turns: Turns
    ) -> tuple[str, Exception | None]:
        """Return what differs, or an empty text; and the error if one was raised."""
        accelerated = bool(self.replicas.accelerators)
        before = _switches(accelerated=accelerated)
        try:
            with refusing_writes(self.replicas):
                found = self._run(attempt, audit, context, audit.neighbours, turns.run)
        except Exception as error:  # noqa: BLE001 - the first computation has raised none
            # The second computation needs more memory than the first, whose results are still there.
            return ("", None) if is_memory_error(error) else (f"{type(error).__name__} was raised: {error}", error)
        for place, shard in audit.neighbours.items():
            pairs = zip(audit.names, audit.seals.get(shard.index, ()), found.get(place, ()), strict=False)
            differs = next((name for name, first, again in pairs if first != again), None)
            if differs is not None:
                return f"shard {shard.index} has other bits in {differs} than before", None
        changed = [name for name, value in _switches(accelerated=accelerated).items() if value != before[name]]
        return f"{changed[0]} has another value than before" if changed else "", None


def _switches(*, accelerated: bool) -> dict[str, object]:
    """Return switches of the process by which torch chooses kernels, with those of accelerators where there are any."""
    found: dict[str, object] = {
        "the default dtype": torch.get_default_dtype(),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"torch.backends.cuda.{name}_sdp_enabled()"] = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    if not accelerated:
        return found
    # Not by `get_float32_matmul_precision`, which raises if it cannot express what was set.
    found["torch.backends.cuda.matmul.fp32_precision"] = torch.backends.cuda.matmul.fp32_precision
    for name in ("enabled", "benchmark", "deterministic"):
        found[f"torch.backends.cudnn.{name}"] = getattr(torch.backends.cudnn, name)
    return found


SHARED: Final = (
    "So your code changes something that the threads of the devices share: for a moment the weights or the mode of a "
    "module outside of the model (`functional_call`, `eval()`), the values of parameters, an attribute of a criterion "
    "or of another object, such as a counter or a generator of your own, a preallocated tensor, or a switch of the "
    "process (`torch.backends`, `sdpa_kernel`, `random.seed`), which may be left changed. Make the module or object a "
    "part of the model, of which each device has a copy, or keep the value in a local variable. Or use one device per "
    "process, as with `lockstep run -n 2` and devices=['cpu']."
)
"""What follows from shards that have other bits beside each other, and the cure."""


def one_at_a_time(compute: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that computes the shards of a device while no other device computes its own.

    Args:
        compute: The function to call with the index of a device.
    """
    lock = threading.Lock()

    def alone(place: int) -> None:
        with lock:
            compute(place)

    return alone
