"""Find out from the environment whether this process is one of several, and join them.

torchrun and `lockstep run` say it by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, SLURM's srun by variables
of its own. A process that finds neither is alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.communicators.brief import BriefPeerErrors
from lockstep.communicators.communicator import Communicator
from lockstep.communicators.failure import Failure
from lockstep.communicators.local import LocalCommunicator
from lockstep.communicators.process import ProcessCommunicator
from lockstep.communicators.watch import START, PeerWatch, launcher_keeps_store
from lockstep.errors import OrderError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DEFAULT_TIMEOUT = 60.0
"""Seconds; torch's own is 30 minutes for gloo, which is how long a run would hang on a dead peer."""
BRIEF = "LOCKSTEP_BRIEF"
"""A variable that is there where the ranks of a machine share a console."""
FIRST_STEP_OF_SLURM = 0xFFFF_FFF0
"""Step numbers from here on are SLURM's own: the batch script, an interactive shell."""


@dataclass(frozen=True)
class RunEnvironment:
    """What a launcher tells a process about its run.

    Attributes:
        rank: This process's index in 0..`size`-1.
        size: How many processes there are.
        local_rank: This process's index among those of its machine.
        local_size: How many there are on its machine.
        address: Name or number of the machine where the ranks find each other.
        port: Where there.
        attempt: How often the launcher has started the ranks before.
        agents: How many launchers there are, one a machine.
        agent_store: Whether a launcher keeps the store of addresses, and keeps it over restarts; otherwise
            rank 0 opens one.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    attempt: int = 0
    agents: int = 1
    agent_store: bool = False


def read_environment(variables: Mapping[str, str]) -> RunEnvironment | None:
    """Read what torchrun, `lockstep run` or srun have set; None where a process is alone.

    Args:
        variables: As `os.environ`.

    Raises:
        ValueError: A variable is missing, is no number, or does not fit the others.

    >>> read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # the batch script itself
    True
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        found = _torchrun(variables)
    elif _is_srun(variables):
        found = _slurm(variables)
    else:
        return None
    if not 0 <= found.rank < found.size:
        raise ValueError(f"The environment's rank must lie in 0..{found.size - 1}, got {found.rank}.")
    return found


def _torchrun(variables: Mapping[str, str]) -> RunEnvironment:
    size = _integer(variables, "WORLD_SIZE")
    if size == 1:
        return RunEnvironment(_integer(variables, "RANK"), size)
    return RunEnvironment(
        _integer(variables, "RANK"),
        size,
        local_rank=_integer(variables, "LOCAL_RANK", 0),
        local_size=_integer(variables, "LOCAL_WORLD_SIZE", 1),
        address=_text(variables, "MASTER_ADDR"),
        port=_integer(variables, "MASTER_PORT"),
        attempt=_integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
        agents=_integer(variables, "GROUP_WORLD_SIZE", 1),
        agent_store=launcher_keeps_store(variables),
    )


def _is_srun(variables: Mapping[str, str]) -> bool:
    """Tell a step that srun started from a batch script, whose variables count tasks that do not run."""
    if "SLURM_PROCID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return False
    return _integer(variables, "SLURM_STEP_ID", FIRST_STEP_OF_SLURM) < FIRST_STEP_OF_SLURM


def _slurm(variables: Mapping[str, str]) -> RunEnvironment:
    job, step = _integer(variables, "SLURM_JOB_ID", 0), _integer(variables, "SLURM_STEP_ID")
    return RunEnvironment(
        _integer(variables, "SLURM_PROCID"),
        _integer(variables, "SLURM_STEP_NUM_TASKS"),
        local_rank=_integer(variables, "SLURM_LOCALID", 0),
        address=variables.get("MASTER_ADDR") or first_host(_text(variables, "SLURM_STEP_NODELIST")),
        # Below the ports that Linux gives to outgoing connections; another one for every job and step.
        port=_integer(variables, "MASTER_PORT", 12_000 + (101 * job + step) % 20_000),
        agents=_integer(variables, "SLURM_STEP_NUM_NODES", 1),
    )


def first_host(hosts: str) -> str:
    """Give the first of a list of hosts as SLURM writes it.

    >>> first_host("gpu[007-010,12],login1"), first_host("rack[1-2]n[05,07]"), first_host("a,b")
    ('gpu007', 'rack1n05', 'a')
    """
    numbered = re.sub(r"\[(\d+)[^]]*\]", r"\1", hosts)
    return numbered.partition(",")[0]


def _text(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if not value:
        raise ValueError(
            f"`{name}` must be set in the environment of a process that is one of several. torchrun, "
            "`lockstep run` and srun set it."
        )
    return value


def _integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "") if default is not None else _text(variables, name)
    if text == "" and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` in the environment must be an integer, got {text!r}.") from None


def find_communicator(*, timeout: float | None = None) -> Communicator:
    """Join the processes of this run; alone, there is nothing to join.

    A process group that is initialised already is taken as it is. Otherwise the environment of torchrun,
    `lockstep run` or srun says who the others are, and the default group of torch.distributed is opened over
    gloo, and NCCL where there are GPUs. It stays open until the process ends.

    Args:
        timeout: Seconds that a rank waits for another, more than 0. None for what ``LOCKSTEP_TIMEOUT`` says
            (`lockstep run --timeout` sets it), else 60.

    Raises:
        ValueError: The environment is incomplete or contradicts itself.
        PeerError: A rank did not come in time.
        OrderError: The launcher has started the ranks again, with a store of addresses that still holds those
            of the dead; the message says what cures it.
    """
    seconds = float(os.environ.get("LOCKSTEP_TIMEOUT", DEFAULT_TIMEOUT)) if timeout is None else timeout
    if seconds <= 0:
        raise ValueError(f"`timeout` must be more than 0 seconds, got {seconds:g}.")
    if dist.is_available() and dist.is_initialized():
        return LocalCommunicator() if dist.get_world_size() == 1 else ProcessCommunicator(timeout=seconds)
    found = read_environment(os.environ)
    if found is None or found.size == 1:
        return LocalCommunicator()
    return _join(found, seconds)


def _join(found: RunEnvironment, seconds: float) -> Communicator:
    """Meet the other ranks, watch them from then on, and open the group."""
    timeout = timedelta(seconds=seconds)
    store = _own_part(_store(found, timeout), found)
    keeper = None if found.agent_store else 0
    watch = PeerWatch(store, found.rank, found.size, timeout=seconds, keeper=keeper)
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
        sys.excepthook = BriefPeerErrors(found.rank, found.local_size, sys.excepthook)
    return ProcessCommunicator(timeout=seconds, watch=watch)


def _initialise(found: RunEnvironment, store: Store, timeout: timedelta) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(found.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.size, timeout=timeout)


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
