"""Call a function in several new processes of this machine, which are the ranks of one run."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.arguments import check_integer
from lockstep.communicators import LOOPBACK, RunEnvironment, listening_store, shutdown_timeout_for, timeout_for
from lockstep.errors import PeerError
from lockstep.launch.rank import RankOutcome, first_cause, run_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

FAILURE_TIMEOUT: Final = 10.0
"""Seconds that the other ranks have after the first failure to notice it and to end by themselves."""
KILL_TIMEOUT: Final = 3.0
"""Seconds that a killed process has to disappear."""


def launch(
    main: Callable[..., Any], num_processes: int = 2, args: Sequence[Any] = (), *, timeout: float = 60.0
) -> list[Any]:
    """Call ``main(*args)`` in several new processes, for use in notebooks and tests.

    In each process an updater finds the others by itself, and `find_communicator` returns a communicator with them.
    The processes are spawned, so it does not matter what this process has done with GPUs or threads. The start method
    of multiprocessing is the same in them as in this process. They connect over the loopback only. All of them have
    ended when this function returns or raises. After a failure or Ctrl-C they get SIGTERM, and as many seconds to write
    a snapshot as the variable ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` says, 30 by default.

    Args:
        main: The function to call. It must be defined at the top level of a module that a new process can import.
        num_processes: The number of processes, at least 1.
        args: The arguments of `main`, the same for every rank. They are pickled, and so is what `main` returns.
        timeout: Seconds that a rank waits for another before it raises, more than 0.

    Returns:
        What the ranks returned, in order of ranks.

    Raises:
        ValueError: If a number is out of range, ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` is not an integer of at least 1, or
            a new process cannot import `main`.
        TypeError: If `main` is not callable, or an argument cannot be pickled.
        PeerError: If a rank raised, exited or was killed. It names the rank and holds its traceback.
    """
    check_integer("num_processes", num_processes, minimum=1)
    timeout = timeout_for(timeout, {})
    call = _pickled_call(main, tuple(args))
    with _Ranks(num_processes, call, timeout) as ranks:
        outcomes = ranks.wait()
    cause = first_cause(outcomes)
    if cause is not None:
        raise PeerError(cause.describe(), rank=cause.blamed, phase=cause.phase, traceback=cause.traceback)
    return [outcome.value for outcome in outcomes]


def _pickled_call(main: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments, pickled."""
    # The check comes before any process is started, because an error in a new process would say less about the cause.
    _check_importable(main)
    try:
        return pickle.dumps((main, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"`args` must be picklable to reach a new process, but: {error}. Create such objects inside `main`."
        ) from error


def _check_importable(main: Callable[..., Any]) -> None:
    """Check that a new process can import a function."""
    if not callable(main):
        raise TypeError(f"`main` must be a function, got a {type(main).__name__}.")
    try:
        pickle.dumps(main)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`main` must be a function that a new process can import, got {main!r}. Define it at the top "
            "level of a module, and pass what it needs from its surroundings in `args`."
        ) from error
    # A function of an interactive session can be pickled by its name, but a new process has no session to find it in.
    if main.__module__ == "__main__" and not _is_file(vars(sys.modules["__main__"])):
        raise ValueError(
            f"`main` must be a function that a new process can import, but {main.__qualname__} was typed "
            "into a notebook or an interactive session. Write it to a file (in a notebook: a cell beginning "
            f"with %%writefile train.py) and write `from train import {main.__qualname__}`."
        )


def _is_file(script: dict[str, Any]) -> bool:
    """Return whether the attributes of the main module are those of a script or a module, not of a session."""
    return script.get("__spec__") is not None or Path(script.get("__file__") or "<none>").is_file()


class _Ranks:
    """The processes of one call of `launch`, from their start to their end."""

    def __init__(self, size: int, call: bytes, timeout: float) -> None:
        self._size = size
        self._call = call
        self._timeout = timeout
        # Read before any process starts: an error when they are to end would leave them behind.
        self._shutdown_timeout = shutdown_timeout_for(os.environ)
        self._store: TCPStore | None = None
        self._processes: list[SpawnProcess] = []
        self._messages: list[Connection] = []
        self._outcomes: dict[int, RankOutcome] = {}

    def __enter__(self) -> _Ranks:
        context = get_context("spawn")
        # Starting a process fixes the default start method of this process, and a spawned one has "spawn" as its
        # default. In both it is set to what the user has chosen, or to nothing.
        chosen = get_start_method(allow_none=True)
        self._store = listening_store(LOOPBACK, 0, timedelta(seconds=self._timeout))
        # Only this process holds the writing end. When this process ends, in whatever way, the ranks read the end of
        # the pipe and end as well.
        lifeline, self._alive = context.Pipe(duplex=False)
        try:
            for rank in range(self._size):
                place = RunEnvironment(rank, self._size, rank, self._size, LOOPBACK, self._store.port, agent_store=True)
                messages, report = context.Pipe(duplex=False)
                process = context.Process(
                    target=run_rank,
                    args=(place, self._timeout, chosen, self._call),
                    kwargs={"lifeline": lifeline, "report": report},
                )
                process.start()
                # Only the rank may hold the writing end: otherwise this process could not notice that the rank has
                # ended without an outcome.
                report.close()
                self._processes.append(process)
                self._messages.append(messages)
        except BaseException:
            self.__exit__()
            raise
        finally:
            set_start_method(chosen, force=True)
            lifeline.close()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            _continue(process)
        # A rank with a Snapshot extension writes its state first; any other ends at once.
        _join_processes(self._processes, self._shutdown_timeout)
        for process in self._processes:
            process.kill()
        _join_processes(self._processes, KILL_TIMEOUT)
        for end in (*self._messages, self._alive):
            end.close()
        # This closes the port of the store. An error may keep this object, and with it the store, for much longer.
        self._store = None

    def wait(self) -> list[RankOutcome]:
        """Wait until all ranks have ended, and after a failure for `FAILURE_TIMEOUT` seconds at most.

        Returns:
            One outcome per rank, in order of ranks.
        """
        deadline: float | None = None
        while self._expected():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._collect(left)
            if deadline is None and any(outcome.failed for outcome in self._outcomes.values()):
                deadline = time.monotonic() + FAILURE_TIMEOUT
        return [self._outcomes.get(rank, RankOutcome(rank)) for rank in range(len(self._processes))]

    def _expected(self) -> set[int]:
        """Return the ranks that may still send an outcome."""
        blamed = {outcome.peer for outcome in self._outcomes.values()}
        left = set(range(len(self._processes))) - self._outcomes.keys()
        # If only ranks are left that others have blamed, they hang or are stopped, and will not send anything.
        return set() if left <= blamed else left

    def _collect(self, timeout: float | None) -> None:
        """Wait for the next outcomes, for `timeout` seconds at most."""
        waiting = {self._messages[rank]: rank for rank in range(len(self._processes)) if rank not in self._outcomes}
        for ready in connection.wait(list(waiting), timeout):
            rank = next(rank for messages, rank in waiting.items() if messages is ready)
            self._outcomes[rank] = self._outcome(rank)

    def _outcome(self, rank: int) -> RankOutcome:
        """Return the outcome that a rank sent, or one with the exit code if it ended without sending one."""
        try:
            sent = self._messages[rank].recv_bytes()
        except EOFError:
            self._processes[rank].join()
            return RankOutcome(rank, exit_code=self._processes[rank].exitcode)
        outcome: RankOutcome = pickle.loads(sent)  # noqa: S301 - from our own child, by a pipe
        return outcome


def _continue(process: SpawnProcess) -> None:
    """Send SIGCONT to a process that is stopped, because it would not see that it is to end."""
    if process.is_alive() and process.pid is not None and hasattr(signal, "SIGCONT"):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def _join_processes(processes: Sequence[SpawnProcess], seconds: float) -> None:
    """Wait until processes have ended, for `seconds` in total at most."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
