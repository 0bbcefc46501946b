"""Find out from the environment whether this process is one of several.

torchrun and `lockstep run` say it by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, SLURM's srun by variables
of its own. A process that finds neither is alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

DEFAULT_TIMEOUT = 60.0
"""Seconds; torch's own is 30 minutes for gloo, which is how long a run would hang on a dead peer."""
TIMEOUT = "LOCKSTEP_TIMEOUT"
"""A variable that holds the seconds that a rank waits for another."""
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
        own_gpus: Whether the launcher gives each process GPUs of its own, so that it sees no others.
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
    own_gpus: bool = False

    def variables(self) -> dict[str, str]:
        """Write it in the words of torchrun, so that whatever reads these finds its place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "GROUP_WORLD_SIZE": str(self.agents),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
        }


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


def launcher_keeps_store(variables: Mapping[str, str]) -> bool:
    """Return, by the environment, whether torchrun's own process keeps the store, or else rank 0's."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
        local_size=tasks_of_node(
            variables.get("SLURM_STEP_TASKS_PER_NODE", "1"), _integer(variables, "SLURM_NODEID", 0)
        ),
        own_gpus="SLURM_GPUS_PER_TASK" in variables,
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


def tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks of one node from the list that SLURM writes.

    >>> [tasks_of_node("4(x2),1", node) for node in range(3)]
    [4, 4, 1]
    """
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    return tasks[node] if node < len(tasks) else 1


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


def timeout_for(timeout: float | None, variables: Mapping[str, str]) -> float:
    """Return the seconds that a rank waits for another: those asked for, else the environment's, else 60.

    Raises:
        ValueError: They are not more than 0 or not finite, or the environment's are no number.
    """
    if timeout is None:
        text = variables.get(TIMEOUT, "") or str(DEFAULT_TIMEOUT)
        try:
            timeout = float(text)
        except ValueError:
            raise ValueError(f"`{TIMEOUT}` in the environment must be seconds, got {text!r}.") from None
    if not 0 < timeout < inf:
        rule = "finite; a day is 86400" if timeout == inf else "more than 0 seconds"
        raise ValueError(f"`timeout` must be {rule}, got {timeout:g}.")
    return timeout
