"""Start the program of small runs, wait for its points, and compare how it ends with a run that was left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import lockstep as ls
from tests.support import zygote
from tests.support.resuming import digests, log_lines
from tests.support.waiting import LONG

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.support.programs.signalled"
UPDATES = 12
"""Two epochs of the program."""
INTERVAL = 4
"""The updates between two snapshots of the program."""
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


def start(
    out: Path, points: Iterable[str] = (), *, launcher: Iterable[str] = (), updates: int = UPDATES, **variables: str
) -> subprocess.Popen[str]:
    """Start the program, alone or by a launcher's command line."""
    module = ["-m", PROGRAM, str(out), str(updates), *points]
    command = [*launcher, *module] if launcher else [sys.executable, *module]
    return zygote.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a terminal or a scheduler does it, so that signals for this process do not reach it.
        start_new_session=True,
    )


def lockstep_run(*options: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", *options]


@dataclass
class Reached:
    """The processes that wait at points, by the point, and what was written to stderr up to there."""

    processes: dict[str, int] = field(default_factory=dict)
    text: str = ""


def await_points(process: subprocess.Popen[str], count: int = 1) -> Reached:
    """Wait until processes of a run have reached so many points."""
    reached = Reached()
    assert process.stderr is not None
    for line in process.stderr:
        reached.text += line
        if line.startswith("at "):
            _, point, number = line.split()
            reached.processes[point] = int(number)
        if len(reached.processes) == count:
            return reached
    raise AssertionError(f"The run ended before it reached the points, with {reached.processes}:\n{reached.text}")


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a run, and return its exit code and output. Whatever it has started is killed if it hangs."""
    try:
        output, errors = process.communicate(timeout=LONG * 8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, errors


def finished(out: Path, ranks: Collection[int] | None = None) -> int:
    """Return the number of updates that any rank of a run had finished, or any of some ranks."""
    path = out / "progress"
    notes = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return max((int(note[2]) for note in notes if ranks is None or int(note[0]) in ranks), default=0)


def newest(out: Path) -> tuple[int, tuple[str, ...]]:
    """Return the update of the newest snapshot and why it was written, after each of them was verified."""
    found = ls.snapshots.list(out)
    for each in found:
        ls.snapshots.verify(each.path)
    manifest = found[-1].manifest
    assert manifest is not None
    return found[-1].update, manifest.reasons


@cache
def undisturbed(iterable: str = "") -> tuple[Path, str]:
    """Return the folder and the last line of a run that was left alone."""
    out = Path(mkdtemp(prefix="undisturbed"))
    code, output, errors = ending(start(out, ITERABLE=iterable))
    assert code == 0, errors
    return out, output.splitlines()[-1]


def check_ended(out: Path, line: str, *, resumed_from: int | None, iterable: str = "", is_shared: bool = True) -> None:
    """Check that a run has ended like one that was left alone.

    Args:
        out: The folder of the run.
        line: The last line of its output.
        resumed_from: The update that it must have resumed from; None for any.
        iterable: Whether the batches came from an iterable.
        is_shared: Whether all ranks had this folder; the table is written by rank 0 only.
    """
    whole, expected = undisturbed(iterable)
    first, digest, uses = line.split(" ", 2)
    assert [digest, uses] == expected.split(" ", 2)[1:]
    # Each sample was used once per epoch.
    assert uses == "[2]"
    lines = log_lines(out)
    assert lines == log_lines(whole)
    assert not is_shared or (out / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    counted = [(line["uses/least"], line["uses/most"]) for line in lines if "uses/least" in line]
    assert counted == [(1, 1), (2, 2)]
    assert resumed_from is None or int(first) == resumed_from
    equal = digests(whole)
    assert set(equal) == set(range(1, UPDATES + 1))
    own = digests(out)
    # Of an emergency snapshot before the first update, which an undisturbed run does not write.
    own.pop(0, None)
    assert {update: own[update].digest for update in own} == {update: equal[update].digest for update in own}


def resume(out: Path, *, launcher: Iterable[str] = (), **variables: str) -> str:
    """Run the program to its end, and return its last line."""
    code, output, errors = ending(start(out, launcher=launcher, **variables))
    assert code == 0, errors
    return output.splitlines()[-1]
