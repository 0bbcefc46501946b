"""Call a function in several new processes of this machine, joined as the ranks of one run."""

from __future__ import annotations

import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from lockstep.communicators import RunEnvironment, timeout_for
from lockstep.errors import PeerError
from lockstep.launch.outcome import Outcome, first_cause
from lockstep.launch.rank import run_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK: Final = "127.0.0.1"
GRACE: Final = 10.0
"""Seconds that the other ranks have after the first failure, to notice it and to end by themselves."""
PATIENCE: Final = 3.0
"""Seconds between a request to end and the end by force."""


def launch(
    main: Callable[..., Any], num_processes: int = 2, args: Sequence[Any] = (), *, timeout: float = 60.0
) -> list[Any]:
    """Call ``main(*args)`` in several new processes; for notebooks and tests.

    In each of them an updater finds the others without another line, or `find_communicator` joins them. The
    processes are spawned: whatever this one has done to GPUs or threads does no harm. In them multiprocessing has
    the start method that this process has set, or the platform's own. They meet over the loopback only, and
    have ended, all of them, when this returns or raises.

    Args:
        main: A function at the top level of a module that a new process can import.
        num_processes: How many, at least 1.
        args: Its arguments, the same for every rank; they are pickled, as is what it returns.
        timeout: Seconds that a rank waits for another, more than 0.

    Returns:
        What the ranks returned, in order of ranks.

    Raises:
        ValueError: A number is out of range, or `main` cannot be imported by a new process.
        TypeError: `main` is no function, or an argument cannot be pickled.
        PeerError: A rank raised, exited or was killed; it names the rank and holds its traceback.
    """
    if num_processes < 1:
        raise ValueError(f"`num_processes` must be at least 1, got {num_processes}.")
    timeout = timeout_for(timeout, {})
    call = _pickled_call(main, tuple(args))
    with _Ranks(num_processes, call, timeout) as ranks:
        outcomes = ranks.wait()
    cause = first_cause(outcomes)
    if cause is not None:
        raise PeerError(cause.describe(), rank=cause.blamed, phase=cause.phase, traceback=cause.traceback)
    return [outcome.value for outcome in outcomes]


def _pickled_call(main: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the call, and refuse what a new process could not load before any is started."""
    _check_importable(main)
    try:
        return pickle.dumps((main, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"`args` must be picklable to reach a new process, but: {error}. Make such objects inside `main`."
        ) from error


def _check_importable(main: Callable[..., Any]) -> None:
    if not callable(main):
        raise TypeError(f"`main` must be a function, got a {type(main).__name__}.")
    try:
        pickle.dumps(main)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`main` must be a function that a new process can import, got {main!r}. Define it at the top "
            "level of a module; what it takes from around it can be given by `args`."
        ) from error
    if main.__module__ == "__main__" and not _is_file(vars(sys.modules["__main__"])):
        raise ValueError(
            f"`main` must be a function that a new process can import, but {main.__qualname__} was typed "
            "into a notebook or an interactive session. Write it to a file (in a notebook: a cell beginning "
            f"with %%writefile train.py) and say `from train import {main.__qualname__}`."
        )


def _is_file(script: dict[str, Any]) -> bool:
    """Tell a script or module from what was typed."""
    return script.get("__spec__") is not None or Path(script.get("__file__") or "<none>").is_file()


def _loopback_store(timeout: float) -> TCPStore:
    """Open the store where the ranks find each other, out of reach for other machines."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]  # documented, and not typed
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


class _Ranks:
    """The processes of one launch, from their start to their end."""

    def __init__(self, size: int, call: bytes, timeout: float) -> None:
        self._size = size
        self._call = call
        self._timeout = timeout
        self._store: TCPStore | None = None
        self._processes: list[SpawnProcess] = []
        self._messages: list[Connection] = []
        self._outcomes: dict[int, Outcome] = {}

    def __enter__(self) -> _Ranks:
        context = get_context("spawn")
        # Starting a process by a context of its own settles the default for this process, and spawning settles
        # "spawn" in the new one; both shall find what the user has chosen, or nothing.
        chosen = get_start_method(allow_none=True)
        self._store = _loopback_store(self._timeout)
        # Held by this process alone: when it ends, however that comes, the ranks read its end and end too.
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
        for stop in (SpawnProcess.terminate, SpawnProcess.kill):
            for process in self._processes:
                stop(process)
            _join(self._processes, PATIENCE)
        for end in (*self._messages, self._alive):
            end.close()
        self._store = None  # which closes its port, though an error may keep this object

    def wait(self) -> list[Outcome]:
        """Wait for the ranks' ends; once one has failed the others have little time left."""
        deadline: float | None = None
        while self._expected():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._collect(left)
            if deadline is None and any(outcome.failed for outcome in self._outcomes.values()):
                deadline = time.monotonic() + GRACE
        return [self._outcomes.get(rank, Outcome(rank)) for rank in range(len(self._processes))]

    def _expected(self) -> set[int]:
        """List the ranks that may yet have something to say: not one that all others have given up."""
        blamed = {outcome.peer for outcome in self._outcomes.values()}
        left = set(range(len(self._processes))) - self._outcomes.keys()
        return set() if left <= blamed else left

    def _collect(self, timeout: float | None) -> None:
        waiting = {self._messages[rank]: rank for rank in range(len(self._processes)) if rank not in self._outcomes}
        for ready in connection.wait(list(waiting), timeout):
            rank = next(rank for messages, rank in waiting.items() if messages is ready)
            self._outcomes[rank] = self._outcome(rank)

    def _outcome(self, rank: int) -> Outcome:
        """Read what a rank has to say; its end without a word is told by its exit code."""
        try:
            sent = self._messages[rank].recv_bytes()
        except EOFError:
            self._processes[rank].join()
            return Outcome(rank, exit_code=self._processes[rank].exitcode)
        outcome: Outcome = pickle.loads(sent)  # noqa: S301 - from our own child, by a pipe
        return outcome


def _join(processes: Sequence[SpawnProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
