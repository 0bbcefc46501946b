"""Processes that start once and run one function after another, each time as the ranks of a new run.

Importing torch takes a process longer than most programs of the tests do. `tests.support.ranks` has the
functions that tests call.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lockstep.communicators import end_with_parent
from tests.support import zygote
from tests.support.settings import differences, new_threads, process_settings

LIMIT = 500.0
"""Seconds that a program may take; less than pytest waits, so that the stacks of a rank that hangs are shown."""
GRACE = 10.0
"""Seconds that the other ranks have to end after one has failed."""


KEPT = 3
"""Processes that stay for the next program; few programs need more, and each takes 300 MB."""


class RankError(Exception):
    """A program failed on a rank; the message holds what each rank said."""


@dataclass(frozen=True)
class Conditions:
    """What a new process would inherit from the one that starts it."""

    variables: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def adopt(self) -> None:
        """Set them in this process."""
        os.environ.clear()
        os.environ.update(self.variables)
        os.chdir(self.folder)
        sys.path[:] = self.path


class RankPool:
    """Processes of this machine that run a function at the same time.

    A process is started when a function needs more of them than there are. When a function fails on one of
    them, or leaves something changed there, all are ended, and the next call starts new ones.

    Args:
        first: Statements of Python that a new process runs before anything else.
    """

    def __init__(self, first: str = "pass") -> None:
        self._first = first
        self._members: list[_Member] = []
        atexit.register(self.close)  # for programs other than pytest; a second call does nothing

    def call(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function in several processes at once, and return what it returned in each.

        Args:
            function: A function at the top level of a module.
            arguments: The function's arguments on each rank; there are as many ranks.

        Raises:
            RankError: If the function raised on a rank, or a rank died, hung, or was left changed.
        """
        while len(self._members) < len(arguments):
            self._members.append(_Member(len(self._members), self._first))
        members = self._members[: len(arguments)]
        conditions = Conditions()
        try:
            for member, given in zip(members, arguments, strict=True):
                member.messages.send_bytes(pickle.dumps((conditions, pickle.dumps((function, given)))))
            results = _results(members)
        except BaseException:
            self.close(patience=1.0)  # in which a rank that is told to abort shows its stacks
            raise
        self._end(self._members[KEPT:])
        return results

    def close(self, patience: float = GRACE) -> None:
        """End the processes; a later call starts new ones.

        Args:
            patience: The seconds that they have to end by themselves.
        """
        self._end(self._members, patience)

    def _end(self, members: Sequence[_Member], patience: float = GRACE) -> None:
        for member in members:
            member.messages.close()  # at whose end an idle process ends
        for member in members:
            member.end(patience)
        self._members = [member for member in self._members if member not in members]


class _Member:
    """One process of a pool, as seen from outside."""

    def __init__(self, seed: int, first: str) -> None:
        self.messages, theirs = Pipe()
        serving = f"import sys; sys.path[:] = {sys.path!r}; {first}; from tests.support.rank_pool import serve; "
        # A process of multiprocessing would import pytest, and be found where tests count such processes.
        with theirs:
            self.process = zygote.Popen(
                [sys.executable, "-c", f"{serving}serve({theirs.fileno()}, {seed})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def end(self, patience: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        self.process.wait()


def _results(members: Sequence[_Member]) -> list[Any]:
    """Wait for the answers of all; once one has failed the others have little time left."""
    pending = {member.messages: rank for rank, member in enumerate(members)}
    values, failures = dict[int, Any](), dict[int, str]()
    deadline = time.monotonic() + LIMIT
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for messages in ready:
            rank = pending.pop(messages)
            try:
                succeeded, answer = pickle.loads(messages.recv_bytes())  # noqa: S301 - from our own child
            except (EOFError, ConnectionError):
                succeeded, answer = False, f"The process ended with {members[rank].process.wait()}."
            (values if succeeded else failures)[rank] = answer
            if not succeeded:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in pending.values():
        members[rank].process.send_signal(signal.SIGABRT)
        failures[rank] = "The rank has not ended; its stacks are shown with what the test wrote to stderr."
    if failures:
        raise RankError("\n".join(f"Rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [values[rank] for rank in range(len(members))]


POOL = RankPool()
"""The pool of this process, which all tests share."""


# In a process of the pool --------------------------------------------------------------------------------


def serve(descriptor: int, seed: int) -> None:
    """Run what comes through a connection until it is closed.

    Args:
        descriptor: The number of this end of the connection.
        seed: What torch's generator is seeded with before each function; another one in each process, as torch
            itself would have it.
    """
    end_with_parent()
    zygote.set_name("rank_pool")
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # modules are not looked through after every program
    messages = Connection(descriptor)
    while True:
        try:
            conditions, call = pickle.loads(messages.recv_bytes())  # noqa: S301 - from our parent
        except (EOFError, ConnectionError):
            return
        conditions.adopt()
        torch.manual_seed(seed)
        messages.send_bytes(_answer(call))


def _answer(call: bytes) -> bytes:
    """Call a function; return whether it succeeded and left nothing changed, with its value or what went wrong."""
    try:
        with _unchanged(), _run_ends():
            function, arguments = pickle.loads(call)  # noqa: S301 - from our parent
            value = pickle.dumps((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - told to the parent, which raises
        return pickle.dumps((False, traceback.format_exc()))
    return value


@contextmanager
def _unchanged() -> Iterator[None]:
    """Check that the process is afterwards as it was."""
    before, threads = process_settings(), set(threading.enumerate())
    yield
    changed = differences(before, process_settings())
    assert not changed, f"the program left changes behind: {changed}"
    left = [thread.name for thread in new_threads(threads)]
    assert not left, f"the program left threads behind: {left}"


@contextmanager
def _run_ends() -> Iterator[None]:
    """End a run as the end of its process would: end lockstep's threads, then the process group."""
    callbacks: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
    known = len(callbacks)
    yield
    added = callbacks[known:]
    ours = [callback for callback in added if _registered(callback).__module__.startswith("lockstep.")]
    callbacks[known:] = [callback for callback in added if callback not in ours]
    for callback in reversed(ours):
        callback()
    end_group()


def _registered(callback: Any) -> Any:
    """Return the function that was registered: a partial has it, and from Python 3.14 on, the cell of a closure."""
    return callback.func if isinstance(callback, partial) else inspect.getclosurevars(callback).nonlocals["func"]


def end_group() -> None:
    """Destroy the default process group, if there is one, and check that nothing holds it.

    Its threads end with the last hold on it; the next run is to find none of them.
    """
    if not dist.is_initialized():
        return
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None, "something still holds the process group"
