"""Read from the environment which process of a run this one is.

torchrun and `lockstep run` set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; SLURM's srun sets variables of its
own. A process that finds neither runs alone.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from math import inf
from typing import Final

LOOPBACK: Final = "127.0.0.1"
"""The address at which the ranks of one machine meet, and that no other machine can reach."""
DEFAULT_TIMEOUT = 60.0
"""Seconds. PyTorch's own default for gloo is 30 minutes, for which a run would hang when a peer has died."""
TIMEOUT_ENV = "LOCKSTEP_TIMEOUT"
"""The variable that holds how many seconds a rank waits for another."""
BRIEF_ENV = "LOCKSTEP_BRIEF"
"""The variable that is set when all ranks of a machine write to the same console."""
SHUTDOWN_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The variable by which torchrun's agent knows how many seconds its processes have after a signal."""
SHUTDOWN_TIMEOUT = 30
"""Seconds that the processes have to write their state and end after a signal, before they are killed."""
FIRST_RESERVED_STEP = 0xFFFF_FFF0
"""SLURM uses step numbers from this one on for the batch script and for interactive shells."""


@dataclass(frozen=True)
class RunEnvironment:
    """What a launcher tells a process about its run.

    Attributes:
        rank: The index of this process, from 0 to `size` - 1.
        size: The number of processes.
        local_rank: The index of this process among the processes of its machine.
        local_size: The number of processes on its machine.
        address: The name or IP address of the machine where the ranks meet.
        port: The TCP port on that machine.
        restarts: How often the launcher has restarted the ranks.
        agents: The number of launcher processes, one per machine.
        agent_store: Whether a launcher process hosts the rendezvous store, and keeps it over restarts. If not,
            rank 0 hosts it.
        own_gpus: Whether the launcher restricts each process to GPUs of its own.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    restarts: int = 0
    agents: int = 1
    agent_store: bool = False
    own_gpus: bool = False

    @property
    def on_one_machine(self) -> bool:
        """Whether it is known that all ranks run on this machine."""
        return self.local_size == self.size

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set for this process."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "GROUP_WORLD_SIZE": str(self.agents),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
        }


def read_environment(variables: Mapping[str, str]) -> RunEnvironment | None:
    """Read the variables that torchrun, `lockstep run` or srun have set.

    Args:
        variables: The environment variables, such as `os.environ`.

    Returns:
        The place of this process in its run, or None if the process runs alone.

    Raises:
        ValueError: If a variable is missing, is not an integer, or contradicts the others.

    >>> read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # the batch script itself
    True
    """
    # torchrun comes first: srun may have started it, and then its children see the variables of both.
    if "RANK" in variables and "WORLD_SIZE" in variables:
        found = _read_torchrun(variables)
    elif _is_srun(variables):
        found = _read_slurm(variables)
    else:
        return None
    if not 0 <= found.rank < found.size:
        raise ValueError(f"The environment's rank must lie in 0..{found.size - 1}, got {found.rank}.")
    return found


def _read_torchrun(variables: Mapping[str, str]) -> RunEnvironment:
    size = _read_integer(variables, "WORLD_SIZE")
    if size == 1:
        # A single process needs no address to meet at, so the variables for it may be missing.
        return RunEnvironment(_read_integer(variables, "RANK"), size)
    return RunEnvironment(
        _read_integer(variables, "RANK"),
        size,
        local_rank=_read_integer(variables, "LOCAL_RANK", 0),
        local_size=_read_integer(variables, "LOCAL_WORLD_SIZE", 1),
        address=_read_text(variables, "MASTER_ADDR"),
        port=_read_integer(variables, "MASTER_PORT"),
        restarts=_read_integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
        agents=_read_integer(variables, "GROUP_WORLD_SIZE", 1),
        agent_store=launcher_hosts_store(variables),
    )


def launcher_hosts_store(variables: Mapping[str, str]) -> bool:
    """Return whether torchrun's own process hosts the rendezvous store; if not, rank 0 does."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def use_loopback(variables: MutableMapping[str, str]) -> None:
    """Set the loopback as the interface of gloo and NCCL, unless interfaces are set.

    Args:
        variables: The environment variables, such as `os.environ`. Changed in place.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name in {"lo", "lo0"}), "lo")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        variables.setdefault(name, loopback)


def _is_srun(variables: Mapping[str, str]) -> bool:
    """Return whether srun started this process."""
    # A batch script has SLURM variables, too, and they count tasks that are not running. Only srun sets the number
    # of tasks of a step, with a step number below the reserved ones.
    if "SLURM_PROCID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return False
    return _read_integer(variables, "SLURM_STEP_ID", FIRST_RESERVED_STEP) < FIRST_RESERVED_STEP


def _read_slurm(variables: Mapping[str, str]) -> RunEnvironment:
    job, step = _read_integer(variables, "SLURM_JOB_ID", 0), _read_integer(variables, "SLURM_STEP_ID")
    return RunEnvironment(
        _read_integer(variables, "SLURM_PROCID"),
        _read_integer(variables, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_integer(variables, "SLURM_LOCALID", 0),
        local_size=tasks_of_node(
            variables.get("SLURM_STEP_TASKS_PER_NODE", "1"), _read_integer(variables, "SLURM_NODEID", 0)
        ),
        own_gpus="SLURM_GPUS_PER_TASK" in variables,
        address=variables.get("MASTER_ADDR") or first_host(_read_text(variables, "SLURM_STEP_NODELIST")),
        # All ranks must find the same port without a message. It is below the ports that Linux assigns to outgoing
        # connections, and depends on job and step, so that those that run side by side rarely share one.
        port=_read_integer(variables, "MASTER_PORT", 12_000 + (101 * job + step) % 20_000),
        agents=_read_integer(variables, "SLURM_STEP_NUM_NODES", 1),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's notation.

    >>> first_host("gpu[007-010,12],login1"), first_host("rack[1-2]n[05,07]"), first_host("a,b")
    ('gpu007', 'rack1n05', 'a')
    """
    numbered = re.sub(r"\[(\d+)[^]]*\]", r"\1", hosts)
    return numbered.partition(",")[0]


def tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks of one node from the list that SLURM writes.

    >>> [tasks_of_node("4(x2),1", node) for node in range(3)]
    [4, 4, 1]
    """
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    return tasks[node] if node < len(tasks) else 1


def _read_text(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if not value:
        raise ValueError(
            f"`{name}` must be set in the environment of a process that is one of several. Start the script with "
            "torchrun, `lockstep run` or srun, which set it."
        )
    return value


def _read_integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "") if default is not None else _read_text(variables, name)
    # A variable that is set to an empty string counts as unset.
    if text == "" and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` in the environment must be an integer, got {text!r}.") from None


def timeout_for(timeout: float | None, variables: Mapping[str, str]) -> float:
    """Return how many seconds a rank waits for another before it raises.

    Args:
        timeout: The number of seconds to use, finite and more than 0; None for the number in ``LOCKSTEP_TIMEOUT``,
            or 60 if that variable is not set.
        variables: The environment variables, such as `os.environ`.

    Raises:
        ValueError: If the timeout is not more than 0 or not finite, or if the variable does not hold a number.
    """
    if timeout is None:
        text = variables.get(TIMEOUT_ENV, "") or str(DEFAULT_TIMEOUT)
        try:
            timeout = float(text)
        except ValueError:
            raise ValueError(f"`{TIMEOUT_ENV}` in the environment must be seconds, got {text!r}.") from None
    # The condition also fails for NaN. Infinity cannot be expressed as the timedelta that torch.distributed needs.
    if not 0 < timeout < inf:
        rule = "finite; a day is 86400" if timeout == inf else "more than 0 seconds"
        raise ValueError(f"`timeout` must be {rule}, got {timeout:g}.")
    return timeout


def shutdown_timeout_for(variables: Mapping[str, str]) -> int:
    """Return how many seconds processes have to write their state and end after a signal, before they are killed.

    Args:
        variables: The environment variables, such as `os.environ`.

    Raises:
        ValueError: If the variable ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` does not hold an integer of at least 1.
    """
    seconds = _read_integer(variables, SHUTDOWN_ENV, SHUTDOWN_TIMEOUT)
    if seconds < 1:
        raise ValueError(f"`{SHUTDOWN_ENV}` in the environment must be at least 1 second, got {seconds}.")
    return seconds
