"""A run whose launcher restarts it goes on by itself, on what is left, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interrupting import await_points, check_ended, ending, lockstep_run, start
from tests.support.processes import children

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("launcher", "points"),
    [
        (lockstep_run("-n", "2", "--max-restarts", "1"), ("rank0.loss:5",)),
        pytest.param(
            lockstep_run("-n", "3", "--max-restarts", "1"), ("rank0.step:7", "rank1.step:7"), marks=[pytest.mark.slow]
        ),
        pytest.param(
            [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"], ("rank1.step:5",), marks=[pytest.mark.slow]
        ),
    ],
)
def test_killed_workers_are_restarted(tmp_path: Path, launcher: list[str], points: tuple[str, ...]) -> None:
    with start(tmp_path, points, launcher=launcher, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as process:
        reached = await_points(process, len(points)).processes
        for each in reached.values():
            os.kill(each, signal.SIGKILL)
        code, output, errors = ending(process)
    assert code == 0, errors
    # It went on where the survivor was.
    resumed_from = int(output.splitlines()[-1].split()[0])
    finished = int(points[0].partition(":")[2])
    assert resumed_from in {finished, finished + 1}
    check_ended(tmp_path, output.splitlines()[-1], resumed_from=resumed_from)


def machine(out: Path, port: int, number: int, points: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the agent of a machine, which has a folder of its own."""
    meeting = ["-n", "1", "--nnodes", "1:2", "--rdzv", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    launcher = lockstep_run(*meeting, "--max-restarts", "3", "--shutdown-timeout", "10")
    return start(out / str(number), points, launcher=launcher)


@pytest.mark.slow
def test_the_run_goes_on_without_a_machine(tmp_path: Path) -> None:
    port = free_port()
    # The agent that comes first hosts the meeting point; either machine may have rank 0.
    with machine(tmp_path, port, 0, ()) as host, machine(tmp_path, port, 1, ("loss:5",)) as other:
        await_points(other)
        for each in (other.pid, *children(other.pid)):
            os.kill(each, signal.SIGKILL)
        ending(other)
        code, output, errors = ending(host)
    assert code == 0, errors
    line = output.splitlines()[-1]
    # The machines share no folder, so what the run goes on from was written by the survivor.
    assert int(line.split()[0]) in {5, 6}
    check_ended(tmp_path / "0", line, resumed_from=None)
