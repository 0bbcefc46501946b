"""Start a script on several processes of one or several machines, by torchrun's own agent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from lockstep.arguments import check_integer
from lockstep.communicators import (
    AGENT_ENV,
    BRIEF_ENV,
    LOOPBACK,
    SHUTDOWN_ENV,
    TIMEOUT_ENV,
    is_ip_address,
    listening_store,
    shutdown_timeout_for,
    timeout_for,
    use_loopback,
)
from lockstep.state import temporarily

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""The signals that the agent passes on to its processes. By default torch leaves out SIGUSR1, which schedulers send."""
LOOPBACK_BACKEND: Final = "lockstep-loopback"
"""The name under which torch knows `LoopbackRendezvous`."""
RENDEZVOUS_OPTIONS: Final = "keep_alive_interval=1,keep_alive_max_attempt=3"
"""Options by which a machine that is gone is noticed after seconds; with torch's defaults it takes a minute."""
LAST_CALL_MARGIN: Final = 3
"""Seconds that machines which are there wait for others longer than the processes of these may take to end."""


@dataclass(frozen=True)
class Run:
    """The script to start, and the processes and machines to start it on: what the options of `lockstep run` say.

    Attributes:
        script: The path of the script, or the name of a module if `module` is true.
        arguments: The arguments of the script.
        num_processes: The number of processes on this machine, or ``"auto"``, ``"gpu"`` or ``"cpu"``.
        nnodes: The number of machines; ``"2:4"`` for two to four.
        rdzv: The address ``host:port`` at which the machines meet; empty to use this machine alone.
        local_addr: The name or IP address by which other machines reach this one; empty to use its host name.
        rdzv_id: A name that is the same on all machines of one run.
        max_restarts: How often all processes are restarted after one has failed, at least 0.
        timeout: Seconds that a rank waits for another before it raises, more than 0.
        shutdown_timeout: Seconds that the processes have after a signal or a failure to write their state and end,
            before they are killed, at least 1; None for those of `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` if it is set, else
            30.
        module: Whether `script` is the name of a module.

    Raises:
        ValueError: If an attribute is out of range, or `rdzv` is missing for several machines.
    """

    script: str
    arguments: Sequence[str] = ()
    num_processes: str = "auto"
    nnodes: str = "1"
    rdzv: str = ""
    local_addr: str = ""
    rdzv_id: str = "lockstep"
    max_restarts: int = 0
    timeout: float = 60.0
    shutdown_timeout: int | None = None
    module: bool = False

    def __post_init__(self) -> None:
        if self.nnodes != "1" and not self.rdzv:
            raise ValueError("`--rdzv` must be host:port for several machines, the same on each; got none.")
        # Words are for torchrun, which knows more of them.
        if not self.num_processes.isalpha() and not (self.num_processes.isdecimal() and int(self.num_processes) > 0):
            raise ValueError(f"`-n` must be at least 1, got {self.num_processes}.")
        check_integer("max_restarts", self.max_restarts, minimum=0)
        if self.shutdown_timeout is not None:
            check_integer("shutdown_timeout", self.shutdown_timeout, minimum=1)
        # These refuse what is no timeout, in the environment too.
        timeout_for(self.timeout, {})
        self._seconds_to_end(os.environ)

    def command_line(self) -> list[str]:
        """Return the arguments for torchrun."""
        # torchrun's --standalone would listen on all interfaces for pickles.
        meeting = ["--rdzv-backend", LOOPBACK_BACKEND, "--rdzv-endpoint", f"{LOOPBACK}:0", "--rdzv-id", self.rdzv_id]
        if self.rdzv:
            meeting = ["--nnodes", self.nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.rdzv]
            host, _ = self._endpoint()
            # At an IP address, `open_store` hosts the store. torch recognizes its own machine by host name only, and
            # might find no machine to host the store.
            hosts = ",is_host=0" if is_ip_address(host) else ",is_host=1" if is_own_address(host) else ""
            # A machine that is too busy to send heartbeats while it ends its processes, to let another one join, is
            # thought dead. The other must not begin without it: it would be interrupted as soon as this one is back,
            # and if it is as busy then, each would interrupt the other for ever.
            last_call = f",last_call_timeout={self._seconds_to_end(os.environ) + LAST_CALL_MARGIN}"
            meeting += ["--rdzv-id", self.rdzv_id, "--rdzv-conf", RENDEZVOUS_OPTIONS + last_call + hosts]
            meeting += ["--local-addr", self.local_addr] if self.local_addr else []
        start = ["--nproc-per-node", self.num_processes, "--max-restarts", str(self.max_restarts)]
        # torch would handle ignored signals as well, and end what nohup has started.
        handled = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
        start += ["--signals-to-handle", ",".join(handled)]
        module = ["--module"] if self.module else []
        return [*meeting, *start, *module, self.script, *self.arguments]

    def open_store(self) -> TCPStore | None:
        """Open the store where the machines meet if this one has its IP address, to listen there and nowhere else.

        Returns:
            The store, which must be kept until the run has ended; None if another machine or another agent hosts it,
            or torch does: it listens on all interfaces for a name, which may stand for several addresses.
        """
        host, port = self._endpoint()
        if is_ip_address(host):
            with suppress(OSError):
                return listening_store(host, port, timedelta(seconds=self.timeout))
        return None

    def _endpoint(self) -> tuple[str, int]:
        """Return the host and the port at which the machines meet; the name of the loopback without `rdzv`."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT  # noqa: PLC0415 - as in `run`
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415 - as in `run`

        return parse_rendezvous_endpoint(self.rdzv, DEFAULT_PORT)

    def _seconds_to_end(self, variables: Mapping[str, str]) -> int:
        """Return the seconds that the processes have to end after a signal or a failure, before they are killed."""
        return self.shutdown_timeout or shutdown_timeout_for(variables)

    def prepare(self, variables: MutableMapping[str, str]) -> None:
        """Set the environment variables that the agent and its processes read.

        Variables that you have set yourself are kept, except for those that `lockstep run` depends on.

        Args:
            variables: The environment variables, such as `os.environ`. Changed in place.
        """
        # An agent that kept its store over restarts would give the new processes the addresses of dead ones.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        variables[BRIEF_ENV] = "1"
        variables[AGENT_ENV] = str(os.getpid())
        variables[TIMEOUT_ENV] = f"{self.timeout:g}"
        variables.setdefault("OMP_NUM_THREADS", "1")
        variables[SHUTDOWN_ENV] = str(self._seconds_to_end(variables))
        # Otherwise gloo and the store print a warning for each broken connection.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not self.rdzv:
            use_loopback(variables)


def is_own_address(host: str) -> bool:
    """Return whether other machines reach this one by a host name or IP address.

    Args:
        host: The host name or IP address.

    Returns:
        Whether the address belongs to this machine; always False on the loopback, where torch decides by itself which
        agent hosts the store.
    """
    try:
        number = socket.gethostbyname(host)
        # Two agents on one machine may represent two machines, and only one of them may host the store.
        if number.startswith("127."):
            return False
        # Only an address of this machine can be bound.
        socket.create_server((number, 0)).close()
    except OSError:
        return False
    return True


def run(settings: Run) -> int:
    """Start the processes of a run, and wait until they have ended.

    Args:
        settings: The script to start, and the processes and machines to start it on.

    Returns:
        The exit code for this process: 0 if all processes succeeded, else the exit code of the process that failed
        first, or 128 plus the number of the signal that ended it.
    """
    # These load about 50 modules of torch that only this process needs, and no rank or other program.
    from torch.distributed import run as torchrun  # noqa: PLC0415 - see above
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - see above
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415 - see above
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415 - see above

    from lockstep.launch.rendezvous import LoopbackRendezvous  # noqa: PLC0415 - see above

    rendezvous_handler_registry.register(LOOPBACK_BACKEND, LoopbackRendezvous)
    settings.prepare(os.environ)
    # It lives as long as this call.
    _store = settings.open_store()
    try:
        with _time_to_end(shutdown_timeout_for(os.environ)):
            torchrun.run(torchrun.parse_args(settings.command_line()))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"lockstep run: {describe(rank, failure)}", file=sys.stderr)
        # torch reports a signal as a negative exit code; shells expect 128 plus its number.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _time_to_end(seconds: int) -> AbstractContextManager[None]:
    """Set how long the agent waits for processes that are to end before it kills them, for whatever reason.

    torch 2.13 reads `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` only after a signal to the agent, and torch 2.11 does not read it
    at all. When a process has failed or all are restarted, the others would be killed after 30 s while they write
    their state (https://github.com/pytorch/pytorch/issues/119856).
    """
    from torch.distributed.elastic.multiprocessing import PContext  # noqa: PLC0415 - as in `run`

    close = PContext.close

    def close_in_time(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:  # noqa: ARG001 - as torch calls it
        close(self, death_sig, seconds)

    return temporarily(PContext, close=close_in_time)


def describe(rank: int, failure: ProcessFailure) -> str:
    """Return a sentence that says how a process ended.

    Args:
        rank: The rank of the process.
        failure: Its failure as torchrun's agent reports it.
    """
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}."
    return f"rank {rank} exited with code {failure.exitcode}; see its output above."
