"""Run jobs as forks of one process that has imported torch and lockstep and has done nothing else.

    python -m lockstep.verify.host     reads batches of jobs from stdin, and writes a line to stdout for each job that
                                       has ended, and an empty one at the end of a batch

A fork takes a fiftieth of a second, where a start of Python with both imports takes several. What a script imports,
allocates and draws happens in its fork alone.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch._dynamo  # noqa: F401 - the first optimizer of a process imports it, which takes a second

from lockstep.verify.instruments import Instruments
from lockstep.verify.recorder import Recorder, UpdatesMade
from lockstep.verify.ways import Job

POLL: Final = 0.01
"""Seconds between two looks at the processes."""
LOOPBACK: Final = "127.0.0.1"


class Task:
    """One way that is being run: its stages, and the processes of the current one.

    Args:
        job: The job of the way.
        end: When its processes are killed.
    """

    def __init__(self, job: Job, end: float) -> None:
        self.name = job.name
        self.end = end
        self.stages = deque(job.stages(_free_port()))
        self.running: set[int] = set()

    def is_running(self) -> bool:
        """Begin the next stage if the processes of the last one have ended; return whether a process is left."""
        for process in list(self.running):
            if time.monotonic() > self.end:
                os.kill(process, signal.SIGKILL)
            if os.waitpid(process, os.WNOHANG)[0]:
                self.running.remove(process)
        if not self.running and self.stages:
            self.running = {_fork(job) for job in self.stages.popleft()}
        return bool(self.running)


def main() -> None:
    """Run batches of jobs until stdin ends."""
    with suppress(EOFError):
        while True:
            run_batch(*pickle.load(sys.stdin.buffer))  # noqa: S301 - from the process that started this one, by a pipe
            print(flush=True)  # noqa: T201 - the answer to that process


def run_batch(jobs: list[Job], at_once: int, seconds: float) -> None:
    """Run jobs, and print the name of each when it has ended.

    Args:
        jobs: The jobs.
        at_once: How many of them run at the same time.
        seconds: The time after which their processes are killed.
    """
    waiting, tasks = deque(jobs), list[Task]()
    while waiting or tasks:
        while waiting and len(tasks) < at_once:
            tasks.append(Task(waiting.popleft(), time.monotonic() + seconds))
        for task in list(tasks):
            if not task.is_running():
                tasks.remove(task)
                print(task.name, flush=True)  # noqa: T201 - as above
        time.sleep(POLL)


def _fork(job: Job) -> int:
    """Start a process for a job, and return its ID."""
    with warnings.catch_warnings():
        # The threads that Python warns of are NumPy's, which has handlers for forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = _run(job)
    finally:
        os._exit(code)


def _run(job: Job) -> int:
    """Run a job in this process, and return its exit code."""
    null = os.open(os.devnull, os.O_RDONLY)
    written = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(null, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    script = os.path.realpath(job.script)
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = str(Path(script).parent)
    os.environ["WANDB_MODE"] = "disabled"
    if job.way.ranks > 1:
        os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.way.ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(job.way.ranks), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(job.port)}
    recorder = Recorder(job.record, job.updates)
    Instruments(job, recorder).install()
    # As in a process of its own; a fork has the state of its parent.
    random.seed()
    np.random.seed()
    code, error = 0, None
    try:
        runpy.run_path(script, run_name="__main__")
    except UpdatesMade:
        pass
    except SystemExit as stopped:
        error = None if not stopped.code else f"The script ended with {stopped.code!r}."
    except BaseException as raised:  # noqa: BLE001 - whatever it is, the table shows it
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        recorder.write({"error": error})
        code = 1
    atexit._run_exitfuncs()  # noqa: SLF001 - `os._exit` below leaves them out
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
