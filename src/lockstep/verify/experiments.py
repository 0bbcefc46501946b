"""Compute one shard or one step several times, to find out what it depends on beside its inputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import torch
from torch.optim import Optimizer

from lockstep.nest import map_tensors
from lockstep.plan import Shard
from lockstep.replicas import FreshMemory, ShardRunner, use_deterministic_kernels
from lockstep.state import temporarily
from lockstep.tree import ShardSum
from lockstep.verify.recorder import LOCAL, bits

NOW: Final = 1_700_000_000.25
LATER: Final = 1_700_086_507.875
"""Two times that user code is shown, in seconds."""
CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


def pin_clocks() -> None:
    """Replace the functions of `time` by ones that can be held at a time in the thread that asks."""
    for name in CLOCKS:
        setattr(time, name, _pinned(getattr(time, name), 1))
        setattr(time, f"{name}_ns", _pinned(getattr(time, f"{name}_ns"), 1_000_000_000))


def _pinned(clock: Callable[[], Any], unit: int) -> Callable[[], Any]:
    def now() -> Any:
        return clock() if LOCAL.now is None else type(clock())(LOCAL.now * unit)

    return now


def kind_of(once: Callable[..., Any]) -> str:
    """Return what a computation depends on beside its inputs, as a key of `CURES`; empty if on nothing.

    Args:
        once: Repeats the computation at a time ``now``, with fresh memory that holds ``value``, and ``elsewhere`` for
            in another thread; returns its bits.
    """
    first = once()
    if once() != first:
        with use_deterministic_kernels("warn"):
            return "kernels" if once() == once() else "state"
    if once(now=LATER) != first:
        return "clock"
    if once(value=float("nan")) != first:
        return "memory"
    return "thread" if once(elsewhere=True) != first else ""


def kind_of_shard(runner: ShardRunner, shard: Shard, given: Any, task: Any) -> str:
    """Return the kind of a shard of an updater, whose results are thrown away.

    Args:
        runner: The replica that has computed it.
        shard: The shard.
        given: Its tensors.
        task: The task of the replica's device.
    """

    def once(*, now: float = NOW, value: float = 0.0, elsewhere: bool = False) -> Any:
        sums = runner.buffers.start_shards(shard.index, deferred=task.context.deferred, compares=False)
        again = replace(task, last=None, gradients=ShardSum(shard.index), reports=[], buffer_sum=sums)
        tensors = map_tensors(torch.clone, given)
        streams, threads = LOCAL.streams, torch.get_num_threads()

        def work() -> None:
            torch.set_num_threads(threads)
            with _experiment(now), FreshMemory(value), streams.open(shard, runner.device):
                again.run(runner, shard, tensors)

        _run(work, elsewhere=elsewhere)
        gradients = [each for partial in again.gradients.partials for each in partial.tensors]
        return [bits(each.loss) for each in again.reports], [each is not None and bits(each) for each in gradients]

    return kind_of(once)


def kind_of_step(optimizer: Optimizer) -> str:
    """Return the kind of an optimizer's next step, which is taken back.

    Args:
        optimizer: The optimizer. It is as before afterwards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    gradients = [None if each.grad is None else each.grad.detach().clone() for each in parameters]
    state = copy.deepcopy(optimizer.state_dict())

    def once(*, now: float = NOW, value: float = 0.0, elsewhere: bool = False) -> Any:
        def work() -> None:
            with _experiment(now), FreshMemory(value):
                optimizer.step()

        _run(work, elsewhere=elsewhere)
        found = [bits(parameter) for parameter in parameters]
        with torch.no_grad():
            for parameter, value_before, gradient in zip(parameters, before, gradients, strict=True):
                parameter.copy_(value_before)
                parameter.grad = None if gradient is None else gradient.clone()
        optimizer.load_state_dict(copy.deepcopy(state))
        return found

    return kind_of(once)


def _experiment(now: float) -> AbstractContextManager[None]:
    """Return a context in which the clocks of this thread stand still, and nothing is recorded."""
    return temporarily(LOCAL, now=now, experiment=True)


def _run(work: Callable[[], None], *, elsewhere: bool) -> None:
    """Run a function, in another thread if asked to; raise its error here."""
    if not elsewhere:
        work()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
