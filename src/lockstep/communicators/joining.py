"""Join the processes that the environment tells of."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

# Its functions keep the default group of the moment of its import as the default of an argument, for good, so
# that no one could end that group. Building torch's first optimizer imports it, so it has to come before.
import torch.distributed.nn.functional

from lockstep.communicators.environment import BRIEF, RunEnvironment, read_environment
from lockstep.communicators.failures import START, Failure, PeerErrorHook, PeerWatch, Watch
from lockstep.errors import OrderError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def join_run(seconds: float) -> Watch:
    """Open the default process group with the processes that the environment tells of.

    Over gloo, and NCCL where there are GPUs; it stays open until the process ends.

    Args:
        seconds: That a rank waits for another.

    Returns:
        What watches the others, from now on.

    Raises:
        RuntimeError: The environment tells of no run.
        ValueError: It is incomplete or contradicts itself.
        PeerError: A rank did not come in time.
        OrderError: The launcher has started the ranks again, with a store of addresses that still holds those
            of the dead; the message says what cures it.
    """
    found = read_environment(os.environ)
    if found is None:
        raise RuntimeError(
            "There must be other processes to join, but torch.distributed is not initialised and nothing in "
            "the environment tells of a run. Start the script with `lockstep run`, torchrun or srun, or call "
            "torch.distributed.init_process_group first."
        )
    if found.size == 1:
        _initialise(found, dist.HashStore(), timedelta(seconds=seconds))  # type: ignore[attr-defined]
        return Watch()
    return _join(found, seconds)


def _join(found: RunEnvironment, seconds: float) -> Watch:
    """Meet the other ranks, watch them from then on, and open the group."""
    timeout = timedelta(seconds=seconds)
    store = _own_part(_store(found, timeout), found)
    keeper = None if found.agent_store else 0
    watch = PeerWatch(store, found.rank, found.size, timeout=seconds, keeper=keeper)
    store.set(f"process/{found.rank}", str(os.getpid()))
    try:
        watch.gather()
        _initialise(found, store, timeout)
    except PeerError:
        watch.close()
        raise
    except RuntimeError as error:
        explained = watch.explain()
        watch.close()
        raise (error if explained is None else explained) from error
    if BRIEF in os.environ:
        sys.excepthook = PeerErrorHook(found.rank, _processes_here(store, found), watch, sys.excepthook)
    return watch


def _processes_here(store: Store, found: RunEnvironment) -> dict[int, int]:
    """Give the process numbers of the other ranks of this machine, whose numbers follow each other."""
    first = found.rank - found.local_rank
    others = set(range(first, first + found.local_size)) - {found.rank}
    return {rank: int(store.get(f"process/{rank}")) for rank in sorted(others)}


def _initialise(found: RunEnvironment, store: Store, timeout: timedelta) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(found.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.size, timeout=timeout)
    atexit.register(_leave, os.getpid())


def _leave(process: int) -> None:
    """Destroy the default process group, unless somebody has; a forked process has none of its threads.

    To let go of a tensor, a thread of gloo's needs Python. If Python is ending then, the thread is ended in
    the middle of a destructor and takes the process with it: "terminate called without an active exception",
    SIGABRT, though the script is through. The end of the group waits for its threads, and comes with the last
    hold on it, so lockstep keeps none.
    """
    if process == os.getpid() and dist.is_initialized():
        dist.destroy_process_group()


def _store(found: RunEnvironment, timeout: timedelta) -> Store:
    keeps = found.rank == 0 and not found.agent_store
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # documented, and not typed
            found.address,
            found.port,
            found.size,
            is_master=keeps,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if keeps:
            raise
        keeper = None if found.agent_store else 0
        what = f"has opened no store at {found.address}:{found.port} within {timeout.total_seconds():g} s"
        raise Failure(keeper, what, START).error() from error


def _own_part(store: Store, found: RunEnvironment) -> Store:
    """Give the part of the store that belongs to this start of the ranks.

    A launcher that keeps its store over restarts also keeps the addresses of dead processes, which gloo would
    wait for. Where one launcher started all ranks they agree on the number of the start; several launchers do
    not count alike, so a rank there can only notice that it was here before.
    """
    part = dist.PrefixStore(f"lockstep/{found.attempt if found.agents == 1 else 0}", store)  # type: ignore[attr-defined]
    if part.add(f"came/{found.rank}", 1) > 1:
        raise OrderError(
            f"Rank {found.rank} has been started before with the same store of addresses, in which those of "
            "dead processes would be found. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of "
            "torchrun, on every machine, or start the script with `lockstep run`, which does."
        )
    return part
