"""Run jobs as forks of one process that has imported torch and lockstep and has done nothing else.

    python -m lockstep.verify.host     reads batches of jobs from stdin, and writes a line to stdout for each process

A fork takes a fiftieth of a second, where a start of Python with both imports takes several. What a script imports,
allocates and draws happens in its fork alone.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np

from lockstep.verify.instruments import Instruments
from lockstep.verify.job import Job
from lockstep.verify.recorder import Recorder, UpdatesMade

POLL: Final = 0.01
"""Seconds between two looks at the processes."""
LOOPBACK: Final = "127.0.0.1"


class Task:
    """One way that is being run: its stages, and the processes of the current one."""

    def __init__(self, job: Job) -> None:
        self.stages = deque(job.stages(_free_port()))
        self.running: dict[int, Job] = {}

    def start(self) -> None:
        """Fork the processes of the next stage."""
        for job in self.stages.popleft():
            self.running[_fork(job)] = job


def main() -> None:
    """Run batches of jobs until stdin ends."""
    for line in sys.stdin:
        batch = json.loads(line)
        run_batch([Job.of_json(each) for each in batch["jobs"]], batch["at_once"], batch["seconds"])
        _say({"batch": "done"})


def run_batch(jobs: list[Job], at_once: int, seconds: float) -> None:
    """Run jobs, and say of each process how it ended.

    Args:
        jobs: The jobs.
        at_once: How many of them run at the same time.
        seconds: The time after which a process is killed.
    """
    waiting, tasks = deque(jobs), list[tuple[Task, float]]()
    while waiting or tasks:
        while waiting and len(tasks) < at_once:
            task = Task(waiting.popleft())
            task.start()
            tasks.append((task, time.monotonic() + seconds))
        for task, end in list(tasks):
            for process, job in list(task.running.items()):
                if time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    del task.running[process]
                    _say({"job": job.name, "code": os.waitstatus_to_exitcode(status)})
            if not task.running and task.stages:
                task.start()
            elif not task.running:
                tasks.remove((task, end))
        time.sleep(POLL)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


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
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
