"""Runs whose processes are killed lose nothing that a survivor has, and resume with the same bits.

They are killed at named points, and at random moments. The full matrix is slow; a seeded sample of it runs always. Each
test makes sure that the processes were killed, where it names a point at that point, and each checks that every sample
was used once per epoch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import lockstep as ls
from tests.support.interrupting import (
    INTERVAL,
    UPDATES,
    await_points,
    check_ended,
    ending,
    finished,
    lockstep_run,
    newest,
    resume,
    start,
)
from tests.support.waiting import await_true

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

SECONDS_OF_AN_UPDATE = 0.025
"""What an update takes at least: most random moments are to come before the last update, where a run waits."""

chosen = random.Random(18)  # noqa: S311 - a choice of tests
SURVIVED_SAMPLE = chosen.sample([each for each in SURVIVED if each[1] == 2], 1)
ALONE_SAMPLE = chosen.sample(ALONE, 1)


def cases(sample: list[tuple[object, ...]], every: list[tuple[object, ...]]) -> list[object]:
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in every if each not in sample]
    return [*sample, *slow]


def on(processes: int) -> list[str]:
    """Return the command line of a launcher, where one is needed."""
    return lockstep_run("-n", str(processes)) if processes > 1 else []


def newest_update(out: Path) -> int:
    return max((each.update for each in ls.snapshots.list(out)), default=0)


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
    point, update = points[0].partition(".")[2].split(":")
    # A rank that is killed at its step has sent all that the survivors need to finish the update.
    last = int(update) + (point == "step")
    survivors = set(range(processes)) - {int(each[4]) for each in points}
    found, reasons = newest(tmp_path)
    assert found == last == finished(tmp_path)
    of_the_interval = {("interval",)} if last % INTERVAL == 0 else set()
    assert reasons in {(f"emergency snapshot of rank {rank}",) for rank in survivors} | of_the_interval
    check_ended(tmp_path, resume(tmp_path, launcher=on(3 if processes == 2 else 1)), resumed_from=last)


def test_what_rank_0_did_not_log_any_more_is_in_the_state_of_a_survivor(tmp_path: Path) -> None:
    with start(tmp_path, ["rank0.logging:5"], launcher=lockstep_run("-n", "2")) as process:
        kill(await_points(process).processes)
        ending(process)
    assert newest(tmp_path) == (5, ("emergency snapshot of rank 1",))
    logged = {name: (tmp_path / name).read_text().splitlines() for name in ("log.jsonl", "metrics.csv")}
    assert [len(lines) for lines in logged.values()] == [4, 1 + 4]
    check_ended(tmp_path, resume(tmp_path), resumed_from=5)


@pytest.mark.parametrize(("point", "update"), cases(ALONE_SAMPLE, ALONE))  # type: ignore[arg-type]
def test_without_a_survivor_the_interval_is_lost(tmp_path: Path, point: str, update: object) -> None:
    with start(tmp_path, [f"{point}:{update}"]) as process:
        assert await_points(process).processes == {f"{point}:{update}": process.pid}
        # The last one of the interval; the one that is being written is lost.
        expected = update - update % INTERVAL if isinstance(update, int) else INTERVAL * (point == "renamed")
        await_true(lambda: newest_update(tmp_path) == expected)
        process.kill()
        code, _, _ = ending(process)
    assert code == -signal.SIGKILL
    assert newest_update(tmp_path) == expected
    check_ended(tmp_path, resume(tmp_path, launcher=on(2)), resumed_from=expected)


def stop_at_six(out: Path) -> None:
    """Run up to a snapshot of update 6, so that there is something to resume from."""
    with start(out, ["loss:5"]) as process:
        await_points(process)
        process.send_signal(signal.SIGTERM)
        assert ending(process)[0] == 143


@pytest.mark.parametrize(
    "points",
    [
        ("rank0.writing:*",),
        *(pytest.param((f"rank{rank}.{each}:*",), marks=pytest.mark.slow) for each in EARLY_POINTS for rank in (0, 1)),
        pytest.param(("rank0.rendezvous:*", "rank1.rendezvous:*"), marks=pytest.mark.slow),
        pytest.param(("rank0.renaming:*",), marks=pytest.mark.slow),
        pytest.param(("rank0.renamed:*",), marks=pytest.mark.slow),
    ],
)
def test_killed_while_starting_or_writing(tmp_path: Path, points: tuple[str, ...]) -> None:
    stop_at_six(tmp_path)
    with start(tmp_path, points, launcher=lockstep_run("-n", "2", "--timeout", "20")) as process:
        reached = await_points(process, len(points)).processes
        assert set(reached) == set(points)
        kill(reached)
        code, _, errors = ending(process)
    assert code == 137
    assert "killed by SIGKILL" in errors
    update = newest(tmp_path)[0]
    assert update >= 6
    check_ended(tmp_path, resume(tmp_path), resumed_from=update)


def test_a_survivor_keeps_what_the_lost_machine_had_sent(tmp_path: Path) -> None:
    # Each rank has a folder of its own, and only rank 0 has the snapshot that they resume from.
    stop_at_six(tmp_path / "0")
    with start(tmp_path / "{rank}", ["rank0.loss:6"], launcher=lockstep_run("-n", "2")) as process:
        kill(await_points(process).processes)
        assert ending(process)[0] == 137
    assert newest(tmp_path / "1") == (6, ("emergency snapshot of rank 1",))
    check_ended(tmp_path / "1", resume(tmp_path / "1"), resumed_from=6, is_shared=False)


@dataclass(frozen=True)
class Kill:
    """Processes of a run that are killed some time after an update has begun, and where the run goes on."""

    processes: int
    killed: tuple[int, ...]
    update: int
    seconds: float
    resumed_on: int

    def __repr__(self) -> str:
        ranks = "+".join(map(str, self.killed))
        return f"{ranks}-of-{self.processes}-at-{self.update}+{self.seconds:.3f}s-on-{self.resumed_on}"


def random_kills(count: int, with_survivor: int) -> list[Kill]:
    """Draw kills; in the first of them a rank survives, and in the others none."""
    drawn, kills = random.Random(60), []  # noqa: S311 - a choice of tests
    for number in range(count):
        processes = drawn.choice([2, 3]) if number < with_survivor else drawn.choice([1, 1, 2, 3])
        victims = drawn.randint(1, processes - 1) if number < with_survivor else processes
        killed = tuple(sorted(drawn.sample(range(processes), victims)))
        resumed_on = drawn.choice([each for each in (1, 2, 3) if each != processes])
        update = drawn.randrange(UPDATES - 2)
        seconds = drawn.uniform(0, SECONDS_OF_AN_UPDATE * (UPDATES - 1 - update))
        kills.append(Kill(processes, killed, update, seconds, resumed_on))
    return kills


RANDOM = random_kills(60, with_survivor=36)


@pytest.mark.slow  # daily, `test_kill_campaign.py` kills at random moments
@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_killed_at_a_random_moment(tmp_path: Path, case: Kill) -> None:
    moments = [f"rank{rank}.moment:{case.update}" for rank in case.killed]
    # A run that is fast waits at its last update, so that it is killed in any case.
    with start(tmp_path, [*moments, f"extension:{UPDATES - 1}"], launcher=on(case.processes)) as process:
        reached = await_points(process, len(moments)).processes
        assert set(reached) == set(moments)
        time.sleep(case.seconds)
        kill(reached)
        code, _, errors = ending(process)
    if case.processes == 1:
        assert code == -signal.SIGKILL
    else:
        assert code == 137
        assert "killed by SIGKILL" in errors
    last, found = finished(tmp_path), newest_update(tmp_path)
    # For the table in docs/snapshot-tests.md, by `pytest -rP`.
    sys.stdout.write(f"{case!r}: {last} finished, {last - found} lost\n")
    assert case.update <= last < UPDATES
    if len(case.killed) < case.processes:
        # Ranks are at most one update apart: a rank may be killed that has finished one for which it was still sending.
        survivors = set(range(case.processes)) - set(case.killed)
        assert found == finished(tmp_path, survivors) >= last - 1
    else:
        # The snapshot that was being written is lost as well, and where that took longer than an interval, the one that
        # waited for it.
        due = last - last % INTERVAL
        written = {int(each.name.split("-")[1]) for each in (tmp_path / "snapshots").glob(".tmp-*")}
        assert found in {due, max(0, due - INTERVAL)} or written == {found + INTERVAL}
    check_ended(tmp_path, resume(tmp_path, launcher=on(case.resumed_on)), resumed_from=found)
