"""Forked processes: what a command finds in one is what it would find in a process that is started anew."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.processes import get_context
from tests.support import zygote
from tests.support.processes import children

pytestmark = pytest.mark.skipif(not zygote.AVAILABLE, reason="only Linux hands a process over to another parent")

FOUND = """
import os, signal, sys, threading
print(os.getppid(), os.getcwd(), sys.argv, sys.path[0], __name__, sorted(name for name in globals() if name[0] != "_"))
print(sorted(os.environ), sorted(os.listdir("/proc/self/fd")))
print(threading.active_count(), signal.getsignal(signal.SIGINT))
print(sys.stdin.readline())
def annotated(x: int): ...
print(annotated.__annotations__)
"""


@pytest.mark.parametrize("way", ["code", "script"])
def test_a_fork_finds_what_a_new_process_would(way: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(FOUND)
    folder.mkdir()
    command = [sys.executable, *(["-c", FOUND] if way == "code" else [script]), "--option", "value"]
    variables = {"PYTHONPATH": "a", "LC_ALL": "C.UTF-8"}
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    said = []
    for start in (subprocess.Popen, zygote.Popen):
        with start(list(map(str, command)), cwd=folder, env=variables, **ends) as process:
            said.append((*process.communicate("line\n"), process.returncode))
    anew, forked = said
    assert forked == anew
    assert f"{os.getpid()} {folder}" in anew[0]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; sys.exit(5)", 5, ""),
        ("raise ArithmeticError('at the end')", 1, "ArithmeticError: at the end"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'left')", 0, "left"),
    ],
)
def test_a_fork_ends_as_a_process_does(code: str, status: int, words: str) -> None:
    done = zygote.run([sys.executable, "-c", code])
    assert done.returncode == status, done.stderr
    assert words in done.stderr


def test_a_fork_is_a_child_that_can_be_stopped_and_killed() -> None:
    code = "import time; print('here', flush=True); time.sleep(300)"
    with zygote.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        assert process.pid in children()
        process.send_signal(signal.SIGSTOP)
        process.kill()
        assert process.wait() == -9
    assert process.pid not in children()


PARENT = """
import os, sys
sys.stdout.write(f"<{os.getppid() == int(os.environ['LOCKSTEP_AGENT'])} {os.getsid(0) == os.getpid()}>")
"""


def test_the_ranks_of_a_forked_agent_are_its_children(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    done = zygote.run([sys.executable, "-m", "lockstep", "run", "-n", "2", script])
    assert (done.returncode, done.stdout) == (0, "<True True>" * 2), done.stderr


def name_and_parent(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send((multiprocessing.current_process().name, os.getppid()))


@pytest.mark.usefixtures("spawned_by_forks")
def test_processes_of_multiprocessing_are_forked() -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=name_and_parent, args=(theirs,), name="forked")
    process.start()
    assert b"zygote_process" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert ours.recv() == ("forked", os.getpid())
    process.join()
    assert process.exitcode == 0


def test_a_fork_ignores_the_signals_that_its_parent_ignores() -> None:
    # They may be ignored already, as under nohup.
    before = signal.getsignal(signal.SIGHUP)
    found = []
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            found.append(zygote.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 1)"]).returncode)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [0, -signal.SIGHUP]


def test_only_python_is_forked() -> None:
    with pytest.raises(AssertionError, match="can be forked, got true"):
        zygote.Popen(["true"])
