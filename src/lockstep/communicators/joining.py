"""Join the other processes of a run, which the environment describes."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

# This module must be imported before a default group is opened. Its functions have the default group at the time of the
# import as the default value of an argument, and would keep that group alive for good. Creating the first optimizer of
# torch imports it.
import torch.distributed.nn.functional

from lockstep.communicators.environment import BRIEF_ENV, LOOPBACK, RunEnvironment, read_environment, use_loopback
from lockstep.communicators.failures.exits import PeerErrorHook
from lockstep.communicators.failures.failure import Failure, is_of_transport
from lockstep.communicators.failures.watch import START, Watch
from lockstep.errors import OrderError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

NO_GPU: Final = "none"
"""What a rank without a GPU says of its own."""


def join_run(seconds: float) -> Watch:
    """Open the default process group with the processes that the environment describes.

    The group is opened over gloo, and over NCCL if every rank has a GPU of its own. It stays open until the process
    ends.

    Args:
        seconds: Seconds that a rank waits for another before it raises.

    Returns:
        The watch over the other ranks, which has started.

    Raises:
        RuntimeError: If the environment describes no run.
        ValueError: If the environment is incomplete or contradicts itself.
        PeerError: If a rank has not joined in time.
        OrderError: If the launcher has restarted the ranks with a store that still holds the addresses of dead
            processes; the message names the remedy.
    """
    environment = read_environment(os.environ)
    if environment is None:
        raise RuntimeError(
            "A ProcessCommunicator needs a run to join, but torch.distributed is not initialized and the environment "
            "describes no run. Start the script with `lockstep run`, torchrun or srun, or call "
            "torch.distributed.init_process_group first."
        )
    if environment.on_one_machine:
        use_loopback(os.environ)
    if environment.size == 1:
        _initialize(environment, dist.HashStore(), timedelta(seconds=seconds))  # type: ignore[attr-defined]
        return Watch()
    return _join(environment, seconds)


def _join(environment: RunEnvironment, seconds: float) -> Watch:
    """Meet the other ranks at the store, start to watch them, and open the group."""
    timeout = timedelta(seconds=seconds)
    store = _store_of_start(_open_store(environment, timeout), environment)
    store_rank = None if environment.agent_store else 0
    watch = Watch(store, environment.rank, environment.size, timeout=seconds, store_rank=store_rank)
    store.set(f"process/{environment.rank}", str(os.getpid()))
    try:
        # Opening the group would wait for a missing rank as well, but could not name it.
        watch.wait_for_all()
        _initialize(environment, store, timeout)
    except PeerError:
        watch.close()
        raise
    except RuntimeError as error:
        explained = watch.explain() if is_of_transport(error) else None
        if explained is None:
            watch.report_failure(error)
        watch.close()
        raise (error if explained is None else explained) from error
    if BRIEF_ENV in os.environ:
        sys.excepthook = PeerErrorHook(environment.rank, _local_processes(store, environment), watch, sys.excepthook)
    return watch


def _local_processes(store: Store, environment: RunEnvironment) -> dict[int, int]:
    """Return the process IDs of the other ranks of this machine, by rank."""
    # Launchers give the processes of one machine consecutive ranks.
    first = environment.rank - environment.local_rank
    others = set(range(first, first + environment.local_size)) - {environment.rank}
    return {rank: int(store.get(f"process/{rank}")) for rank in sorted(others)}


def _initialize(environment: RunEnvironment, store: Store, timeout: timedelta) -> None:
    gpu = NO_GPU
    if torch.cuda.is_available() and dist.is_nccl_available():
        device = environment.local_rank % torch.cuda.device_count()
        # NCCL uses the current device when the group is opened, and refuses two ranks on one GPU.
        torch.cuda.set_device(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    # The same on all ranks, so each says what it has.
    backend = "cpu:gloo,cuda:nccl" if _have_own_gpus(store, environment, gpu) else "gloo"
    dist.init_process_group(backend, store=store, rank=environment.rank, world_size=environment.size, timeout=timeout)
    atexit.register(_destroy_group, os.getpid())


def _have_own_gpus(store: Store, environment: RunEnvironment, gpu: str) -> bool:
    """Return whether every rank has a GPU that no other rank has.

    The numbers of the ranks and of the GPUs that each sees do not tell, because a launcher may show each rank its own.
    """
    store.set(f"gpu/{environment.rank}", gpu)
    gpus = set(store.multi_get([f"gpu/{rank}" for rank in range(environment.size)]))
    return len(gpus) == environment.size and NO_GPU.encode() not in gpus


def _destroy_group(process: int) -> None:
    """Destroy the default process group at the end of the process that opened it, if it still exists.

    Args:
        process: The ID of the process that opened the group. A forked process has none of the group's threads.
    """
    # A thread of gloo needs the interpreter to release a tensor. If Python is ending at that time, the thread is
    # ended in the middle of a destructor and takes the process with it, although the script is done: "terminate
    # called without an active exception", SIGABRT. Destroying the group waits for its threads, but only happens with
    # the last reference to the group, so lockstep keeps none.
    if process == os.getpid() and dist.is_initialized():
        dist.destroy_process_group()


def listening_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a store that listens at one address only.

    Args:
        address: An IP address of this machine.
        port: The port; 0 for a free one.
        timeout: How long calls of the store wait.

    Raises:
        OSError: If this is no IP address of this machine, or the port is in use.
    """
    # TCPStore itself would listen on all interfaces. A socket that listens already also keeps its free port.
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return dist.TCPStore(  # type: ignore[attr-defined]  # documented, and not typed
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def is_ip_address(host: str) -> bool:
    """Return whether a host is given by its IP address, not by a name.

    >>> is_ip_address("10.0.0.7"), is_ip_address("::1"), is_ip_address("node0")
    (True, True, False)
    """
    return ":" in host or host.replace(".", "").isdigit()


def _open_store(environment: RunEnvironment, timeout: timedelta) -> Store:
    is_host = environment.rank == 0 and not environment.agent_store
    address = environment.address
    if environment.on_one_machine and not environment.agent_store:
        address = LOOPBACK
    try:
        if is_host and is_ip_address(address):
            return listening_store(address, environment.port, timeout)
        # A name may stand for other addresses on other machines, so with a name the store listens on all interfaces.
        return dist.TCPStore(  # type: ignore[attr-defined]  # documented, and not typed
            address,
            environment.port,
            environment.size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (OSError, RuntimeError) as error:
        # On the rank that hosts the store the cause is local.
        if is_host:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(
                f"Rank 0 must be able to listen on {address}:{environment.port} (MASTER_ADDR and MASTER_PORT), where "
                f"the ranks meet, but: {reason} If another run uses the port, set another one on all ranks, for "
                "example with torchrun's --master-port. `lockstep run` on one machine finds a free one. If the network "
                "translates the address, set a name instead; the store then listens on all interfaces."
            ) from error
        store_rank = None if environment.agent_store else 0
        what = f"has opened no store at {address}:{environment.port} within {timeout.total_seconds():g} s"
        raise Failure(store_rank, what, START).error() from error


def _store_of_start(store: Store, environment: RunEnvironment) -> Store:
    """Return the part of a store that belongs to this start of the ranks.

    A launcher that keeps its store over restarts also keeps the addresses of dead processes, for which gloo would
    wait.
    """
    # The processes of a single launcher agree on the number of restarts. Several launchers may count differently, so
    # there a rank can only detect that it has been here before.
    start = environment.restarts if environment.agents == 1 else 0
    part = dist.PrefixStore(f"lockstep/{start}", store)  # type: ignore[attr-defined]
    if part.add(f"came/{environment.rank}", 1) > 1:
        raise OrderError(
            f"Rank {environment.rank} has been started before with the same rendezvous store, which still holds the "
            "addresses of dead processes. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on "
            "every machine, or start the script with `lockstep run`, which sets it."
        )
    return part
