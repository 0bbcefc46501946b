"""Run a function on several ranks: real processes, gloo, the loopback.

The processes are those of `tests.support.rank_pool`, which tests share. A test of how ranks start or end
calls `lockstep.launch` instead.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep import ProcessCommunicator
from lockstep.communicators import LOOPBACK, RunEnvironment, listening_store, use_loopback
from lockstep.communicators.failures.watch import Watch
from tests.support.rank_pool import POOL, RankPool

TIMEOUT = 120.0
"""Seconds that a rank waits for another."""


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any, pool: RankPool = POOL) -> list[Any]:
    """Call `function(communicator, *arguments)` on every rank, in processes of a pool; return what the ranks returned.

    The communicator watches no other ranks: one that fails ends the others through the pool.
    """
    # A store that a rank still has open when another failed would hide that failure behind its own removal.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return pool.call(_with_communicator, [(rank, size, folder, function, arguments) for rank in range(size)])


def _with_communicator(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    use_loopback(os.environ)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    result = function(ProcessCommunicator(watch=Watch()), *arguments)
    dist.barrier()
    return result


def launch_on_ranks(main: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `main(*arguments)` on every rank, where `lockstep.find_communicator` joins the others.

    A rank finds what `lockstep.launch` tells a new process, in the same variables.
    """
    store = listening_store(LOOPBACK, 0, timedelta(seconds=TIMEOUT))
    places = [RunEnvironment(rank, size, rank, size, LOOPBACK, store.port, agent_store=True) for rank in range(size)]
    return POOL.call(_launched, [(place, main, arguments) for place in places])


def _launched(place: RunEnvironment, main: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ.update(place.variables() | {"LOCKSTEP_TIMEOUT": str(TIMEOUT)})
    use_loopback(os.environ)
    return main(*arguments)
