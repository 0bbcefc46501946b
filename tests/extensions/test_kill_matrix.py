"""Runs whose processes are killed at named points lose nothing that a survivor has, and resume with the same bits.

The full matrix is slow; a seeded sample of it runs always. Each test makes sure that the process was killed at its
point, and each checks that every sample was used once per epoch.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import lockstep as ls
from tests.support.interrupting import INTERVAL, await_points, check_ended, ending, lockstep_run, newest, resume, start

UPDATE_POINTS = ["sample", "loss", "step", "evaluation", "extension"]
"""The phases of an update and of the iteration it begins. The update of a point is the number of finished ones."""
WRITER_POINTS = ["writing", "renaming", "renamed"]
EARLY_POINTS = ["rendezvous", "resuming"]

SURVIVED = [
    ((f"rank{rank}.{point}:{update}",), processes)
    for point in UPDATE_POINTS
    for update in (1, 5, 7)
    for rank, processes in ((0, 2), (1, 2), (2, 3))
] + [
    ((f"rank0.{point}:{update}", f"rank1.{point}:{update}"), 3)
    for point in ("loss", "step", "extension")
    for update in (2, 6)
]
"""What is killed, of how many processes, where a process survives."""
ALONE = [(point, update) for point in UPDATE_POINTS for update in (2, 5, 7)] + [(each, "*") for each in WRITER_POINTS]

chosen = random.Random(18)  # noqa: S311 - a choice of tests
SURVIVED_SAMPLE = chosen.sample([each for each in SURVIVED if each[1] == 2], 1)
ALONE_SAMPLE = chosen.sample(ALONE, 1)


def cases(sample: list[tuple[object, ...]], every: list[tuple[object, ...]]) -> list[object]:
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in every if each not in sample]
    return [*sample, *slow]


def kill(processes: dict[str, int]) -> None:
    for each in processes.values():
        os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize(("points", "processes"), cases(SURVIVED_SAMPLE, SURVIVED))  # type: ignore[arg-type]
def test_survivors_lose_nothing(tmp_path: Path, points: tuple[str, ...], processes: int) -> None:
    with start(tmp_path, points, launcher=lockstep_run("-n", str(processes))) as process:
        reached = await_points(process, len(points)).processes
        assert set(reached) == set(points)
        kill(reached)
        code, _, errors = ending(process)
    assert code == 137
    assert "killed by SIGKILL" in errors
    finished = int(points[0].partition(":")[2])
    survivors = set(range(processes)) - {int(each[4]) for each in points}
    update, reasons = newest(tmp_path)
    # A rank that is killed after it has sent its gradients leaves survivors that can finish the update.
    assert update in {finished, finished + 1}
    of_the_interval = {("interval",)} if update % INTERVAL == 0 else set()
    assert reasons in {(f"emergency snapshot of rank {rank}",) for rank in survivors} | of_the_interval
    others = 3 if processes == 2 else 1
    launcher = lockstep_run("-n", str(others)) if others > 1 else ()
    check_ended(tmp_path, resume(tmp_path, launcher=launcher), resumed_from=update)


@pytest.mark.parametrize(("point", "update"), cases(ALONE_SAMPLE, ALONE))  # type: ignore[arg-type]
def test_without_a_survivor_the_interval_is_lost(tmp_path: Path, point: str, update: object) -> None:
    with start(tmp_path, [f"{point}:{update}"]) as process:
        assert await_points(process).processes == {f"{point}:{update}": process.pid}
        process.kill()
        code, _, _ = ending(process)
    assert code == -signal.SIGKILL
    found = [each.update for each in ls.snapshots.list(tmp_path)]
    start_of_next = found[-1] if found else 0
    if isinstance(update, int):
        assert update - INTERVAL <= start_of_next <= update
    elif point == "renamed":
        assert start_of_next == INTERVAL
    else:
        assert start_of_next == 0
    check_ended(tmp_path, resume(tmp_path, launcher=lockstep_run("-n", "2")), resumed_from=start_of_next)


@pytest.mark.parametrize(
    "points",
    [
        ("rank0.writing:*",),
        *(pytest.param((f"rank{rank}.{each}:*",), marks=pytest.mark.slow) for each in EARLY_POINTS for rank in (0, 1)),
        pytest.param(("rank0.renaming:*",), marks=pytest.mark.slow),
        pytest.param(("rank0.renamed:*",), marks=pytest.mark.slow),
    ],
)
def test_killed_while_starting_or_writing(tmp_path: Path, points: tuple[str, ...]) -> None:
    # So that there is something to resume from.
    with start(tmp_path, ["loss:5"]) as process:
        await_points(process)
        process.send_signal(signal.SIGTERM)
        assert ending(process)[0] == 143
    with start(tmp_path, points, launcher=lockstep_run("-n", "2", "--timeout", "20")) as process:
        reached = await_points(process).processes
        assert set(reached) == set(points)
        kill(reached)
        code, _, errors = ending(process)
    assert code == 137
    assert "killed by SIGKILL" in errors
    update = newest(tmp_path)[0]
    assert update >= 6
    check_ended(tmp_path, resume(tmp_path), resumed_from=update)
