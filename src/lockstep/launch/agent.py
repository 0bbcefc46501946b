"""Start a script on several processes of one or several machines, by torchrun's own agent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.communicators import AGENT, BRIEF, TIMEOUT, timeout_for
from lockstep.launch.rank import loopback_interface

ENDING: Final = 10
"""Seconds that the processes have to end after Ctrl-C or another signal, before they are killed."""
RENDEZVOUS: Final = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How soon machines notice that one of them is gone; with torch's own times it takes a minute."""


@dataclass(frozen=True)
class Run:
    """What to start, and where.

    Attributes:
        script: The script, or the module where `as_module`.
        arguments: Of the script.
        num_processes: On this machine: a number, or ``"auto"``, ``"gpu"``, ``"cpu"``.
        nodes: How many machines take part; ``"2:4"`` for from two to four.
        rendezvous: ``host:port`` where the machines meet; empty for this machine alone.
        address: Where other machines reach this one; empty for what its name says.
        run_id: The name that machines of one run have in common.
        max_restarts: How often all processes are started again when one has failed.
        timeout: Seconds that a rank waits for another.
        as_module: Whether `script` is the name of a module.
    """

    script: str
    arguments: Sequence[str] = ()
    num_processes: str = "auto"
    nodes: str = "1"
    rendezvous: str = ""
    address: str = ""
    run_id: str = "lockstep"
    max_restarts: int = 0
    timeout: float = 60.0
    as_module: bool = False

    def __post_init__(self) -> None:
        if self.nodes != "1" and not self.rendezvous:
            raise ValueError("`rendezvous` must be host:port for several machines, the same on each; got none.")
        if self.max_restarts < 0:
            raise ValueError(f"`max_restarts` must be at least 0, got {self.max_restarts}.")
        timeout_for(self.timeout, {})

    def command_line(self) -> list[str]:
        """Say it in torchrun's words."""
        meeting = ["--standalone"]
        if self.rendezvous:
            meeting = ["--nnodes", self.nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.rendezvous]
            keeps = ",is_host=1" if is_own_address(self.rendezvous.rpartition(":")[0]) else ""
            meeting += ["--rdzv-id", self.run_id, "--rdzv-conf", RENDEZVOUS + keeps]
            meeting += ["--local-addr", self.address] if self.address else []
        start = ["--nproc-per-node", self.num_processes, "--max-restarts", str(self.max_restarts)]
        module = ["--module"] if self.as_module else []
        return [*meeting, *start, *module, self.script, *self.arguments]

    def prepare(self, variables: MutableMapping[str, str]) -> None:
        """Set what the agent and its processes read from the environment.

        Args:
            variables: As `os.environ`; changed in place. What the user has set himself stays, but for the
                store: an agent that kept one would hand restarted processes the addresses of dead ones.
        """
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        variables[BRIEF] = "1"
        variables[AGENT] = str(os.getpid())
        variables[TIMEOUT] = f"{self.timeout:g}"
        variables.setdefault("OMP_NUM_THREADS", "1")
        variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(ENDING))
        # Else gloo and the store warn of each broken connection.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not self.rendezvous:
            variables.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())


def is_own_address(host: str) -> bool:
    """Tell whether other machines reach this one by a name or number; torch only compares it with host names.

    On the loopback that is left to torch: two agents may stand for two machines there, and one keeps it.
    """
    try:
        number = socket.gethostbyname(host)
        if number.startswith("127."):
            return False
        socket.create_server((number, 0)).close()
    except OSError:
        return False
    return True


def run(settings: Run) -> int:
    """Start the processes, and wait for their end.

    Returns:
        The exit code to end with: 0, that of the process that failed first, or 128 and a signal's number.
    """
    settings.prepare(os.environ)
    try:
        torchrun.run(torchrun.parse_args(settings.command_line()))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"lockstep run: {describe(rank, failure)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def describe(rank: int, failure: ProcessFailure) -> str:
    """Say how a process ended."""
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}."
    return f"rank {rank} exited with code {failure.exitcode}; what it said stands above."
