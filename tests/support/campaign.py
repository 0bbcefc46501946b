"""A campaign of kills: runs that are killed at random moments again and again, and end as one that was left alone.

``python -m tests.support.campaign --seed 1 --seconds 240`` plays chains until the time is over. Each chain is a run
that is killed once to eight times with SIGKILL, each time somewhere else, and started again each time on another
placement: one process, `lockstep run`, torchrun or `launch`, with one to three devices or processes. At its end
weights, digests, log, table, snapshot and the values of TensorBoard, if it is installed, are those of a run that was
left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lockstep as ls
from tests.support import zygote
from tests.support.interrupting import PROGRAM, PYTHONPATH, ROOT, UPDATES, check_ended, ending
from tests.support.processes import descendants
from tests.support.resuming import tensor_files

TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
LAUNCHERS = {
    "python": ["-m", PROGRAM],
    "run": ["-m", "lockstep", "run", "-n", "{processes}", "-m", PROGRAM],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "{processes}", "-m", PROGRAM],
    "launch": ["-m", "tests.support.programs.launched", "{processes}"],
}
OF_AN_UPDATE = {
    "loading": ["sample"],
    "update": ["loss", "step", "logging", "extension"],
    "evaluation": ["evaluation"],
    "any moment": ["moment"],
}
"""The points of the program that have the number of an update, by what is interrupted."""
OF_A_RUN = {"start": ["rendezvous", "resuming"], "snapshot": ["writing", "renaming", "renamed"]}
SECONDS_OF_A_RUN = 0.6
"""A kill without a point comes within this time after its run has begun, or after an update has."""


@dataclass(frozen=True)
class Place:
    """Where a run is computed."""

    launcher: str
    processes: int
    devices: int
    workers: int

    def __str__(self) -> str:
        return f"{self.launcher} {self.processes}x{self.devices}w{self.workers}"


@dataclass(frozen=True)
class Kill:
    """When processes are killed.

    Attributes:
        kind: What is interrupted.
        point: The point at which a process waits for it; empty for none.
        seconds: How long after the point, or after the start.
        everything: Whether all processes are killed at once, and not only the one at the point.
    """

    kind: str
    point: str
    seconds: float
    everything: bool

    def __str__(self) -> str:
        return f"{'all' if self.everything else 'one'} at {self.point or 'start'}+{self.seconds:.3f}s"


def draw_place(draw: random.Random) -> Place:
    launcher = draw.choice(list(LAUNCHERS))
    processes = 1 if launcher == "python" else draw.choice([2, 2, 3])
    devices = draw.choice([1, 2, 3]) if processes == 1 else draw.choice([1, 1, 2])
    return Place(launcher, processes, devices, workers=draw.choice([0, 0, 0, 2]))


def draw_kill(draw: random.Random, place: Place, since: int) -> Kill:
    """Draw a kill of a run that continues after so many updates."""
    kind = draw.choice([*OF_AN_UPDATE, *OF_A_RUN, "start"])
    everything = draw.random() < 0.75
    rank = draw.randrange(place.processes)
    if kind == "start" and draw.random() < 0.5:
        return Kill(kind, "", draw.uniform(0, SECONDS_OF_A_RUN), everything=True)
    if kind in OF_A_RUN:
        # Rank 0 alone writes.
        name = draw.choice(OF_A_RUN[kind])
        return Kill(kind, f"rank{0 if kind == 'snapshot' else rank}.{name}:*", 0.0, everything)
    name = draw.choice(OF_AN_UPDATE[kind])
    update = draw.randrange(since, UPDATES)
    seconds = draw.uniform(0, SECONDS_OF_A_RUN / 2) if name == "moment" else 0.0
    # With workers, they load the samples, where nothing waits.
    if place.workers and name in {"sample", "moment"}:
        name = "loss"
    return Kill(kind, f"rank{rank}.{name}:{update}", seconds, everything)


@contextmanager
def started(out: Path, place: Place, *points: str) -> Iterator[subprocess.Popen[str]]:
    command = [each.format(processes=place.processes) for each in LAUNCHERS[place.launcher]]
    variables = {"PYTHONPATH": PYTHONPATH, "DEVICES": str(place.devices), "WORKERS": str(place.workers)}
    with zygote.Popen(
        [sys.executable, *command, str(out), str(UPDATES), *filter(None, points)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])


def kill(processes: list[int]) -> None:
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def interrupt(out: Path, place: Place, given: Kill) -> bool:
    """Start a run and kill it; return whether it had not ended before."""
    with started(out, place, given.point) as process:
        victims: list[int] = []
        assert process.stderr is not None
        for line in process.stderr if given.point else ():
            if line.startswith(f"at {given.point} "):
                victims = [int(line.split()[2])]
                break
        time.sleep(given.seconds)
        alive = process.poll() is None and bool(victims or not given.point)
        if alive:
            if given.everything:
                victims = descendants(process.pid)
                # First, and with what it forks its ranks from, so that it starts no further one meanwhile. In its first
                # moment a process has no group of its own yet.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                victims.append(process.pid)
            kill(victims)
        ending(process)
    return alive


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the values of TensorBoard as it shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    events: Any = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


@cache
def left_alone() -> Path:
    """Return the folder of a run that was left alone, with the values of TensorBoard."""
    out = Path(mkdtemp(prefix="left-alone"))
    with started(out, Place("python", 1, 1, 0)) as process:
        code, _, errors = ending(process)
    assert code == 0, errors
    return out


def check(out: Path, line: str) -> None:
    """Check that a run has left what one that was left alone has."""
    whole = left_alone()
    check_ended(out, line, resumed_from=None)
    # It names the program that began the run, which is another one for `launch`.
    configurations = [json.loads((each / "metrics.json").read_text()) | {"program": None} for each in (out, whole)]
    assert configurations[0] == configurations[1]
    last = {name: data for name, data in tensor_files(whole).items() if name.startswith(f"{UPDATES:08d}")}
    assert last
    assert {name: data for name, data in tensor_files(out).items() if name in last} == last
    for each in ls.snapshots.list(out):
        ls.snapshots.verify(each.path)
    assert not list(out.rglob("*.new")), "a file that was to replace another is left"
    assert not list(out.rglob(".tmp-*")), "an unfinished snapshot is left"
    if TENSORBOARD:
        assert curves(out) == curves(whole)


def play(out: Path, seed: int) -> Counter[str]:
    """Play a chain, and return how often it was killed in what."""
    draw, killed, told = random.Random(seed), Counter[str](), list[str]()  # noqa: S311 - a choice of moments
    try:
        for _ in range(draw.randint(1, 8)):
            place = draw_place(draw)
            since = max((each.update for each in ls.snapshots.list(out)), default=0)
            given = draw_kill(draw, place, min(since, UPDATES - 1))
            told.append(f"{place}, {given}")
            killed[given.kind] += interrupt(out, place, given)
        place = draw_place(draw)
        told.append(f"{place} to the end")
        with started(out, place) as process:
            code, output, errors = ending(process)
        assert code == 0, errors
        check(out, output.splitlines()[-1] if output else _ended(out))
    except Exception as error:
        raise AssertionError(f"chain {seed} in {out} ended otherwise: {'; '.join(told)}") from error
    return killed


def _ended(out: Path) -> str:
    raise AssertionError(f"the run in {out} printed nothing")


@contextmanager
def with_tensorboard() -> Iterator[None]:
    """Let the runs write for TensorBoard, if it is installed."""
    before = dict(os.environ)
    if TENSORBOARD:
        os.environ |= {"TENSORBOARD": "1", "PRELOADED": "torch.utils.tensorboard"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first chain")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no further chain begins")
    parser.add_argument("--chains", type=int, default=1_000_000, help="the number of chains")
    options = parser.parse_args()
    deadline, total, failed, seed = time.monotonic() + options.seconds, Counter[str](), 0, options.seed
    with with_tensorboard():
        left_alone()
        while time.monotonic() < deadline and seed < options.seed + options.chains:
            out = Path(mkdtemp(prefix=f"chain-{seed}-"))
            try:
                total += play(out, seed)
                shutil.rmtree(out)
            except Exception as error:  # noqa: BLE001 - the next chain is played
                failed += 1
                sys.stdout.write("".join(traceback.format_exception(error)))
            seed += 1
            kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(total.items()))
            ended = f"{seed - options.seed} chains, of which {failed} ended otherwise"
            sys.stdout.write(f"{sum(total.values())} kills ({kinds}) over {ended}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
