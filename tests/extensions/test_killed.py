"""A run that is killed and resumed at another place ends with the bits of one that was not killed."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep as ls
from tests.support import zygote
from tests.support.resuming import log_lines
from tests.support.waiting import LONG

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 50


def command(out: Path, source: str, devices: int, updates: int) -> list[str]:
    return [sys.executable, "-m", "tests.support.programs.killed", str(out), str(devices), str(updates), source]


def finish(out: Path, source: str, devices: int, *launcher: str) -> tuple[int, str]:
    """Run to the end, and return from which update and with which digest of the weights."""
    started = command(out, source, devices, UPDATES)
    line = [sys.executable, "-m", "lockstep", "run", *launcher, "-m", *started[2:]] if launcher else started
    told = zygote.run(line, cwd=ROOT, check=True, timeout=LONG * 10).stdout
    start, digest = told.splitlines()[-1].split()
    return int(start), digest


def kill_in_training(out: Path, source: str) -> None:
    """Kill a run that would not end after some snapshots."""
    with zygote.Popen(command(out, source, 2, 1_000_000), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + LONG * 10
        while not any(each.update >= 20 for each in ls.snapshots.list(out)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow  # daily, `test_kill_matrix.py` kills runs of another program
@pytest.mark.parametrize(("source", "elsewhere"), [("iterator", ["-n", "2"]), ("parts", ["-n", "2"]), ("loader", [])])
def test_kill_and_resume_elsewhere(tmp_path: Path, source: str, elsewhere: list[str]) -> None:
    if source == "loader" and importlib.util.find_spec("torchdata") is None:
        pytest.skip("the loader is torchdata's")
    start, digest = finish(tmp_path / "whole", source, 1)
    assert start == 0
    kill_in_training(tmp_path / "killed", source)
    # What was written after the last update would be newer than the end of the run that is compared.
    early = [each for each in ls.snapshots.list(tmp_path / "killed") if each.update <= 30]
    for each in ls.snapshots.list(tmp_path / "killed"):
        if each.update > 30:
            each.path.rename(each.path.with_name(f"later-{each.update}"))
    start, again = finish(tmp_path / "killed", source, 1, *elsewhere)
    assert start == early[-1].update >= 10
    assert again == digest
    lines = log_lines(tmp_path / "whole")
    assert log_lines(tmp_path / "killed")[: len(lines)] == lines
    compared = ls.snapshots.compare_runs(tmp_path / "whole", tmp_path / "killed")
    assert compared.first is None
    assert compared.equal == UPDATES
