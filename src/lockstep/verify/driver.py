"""Run a script in several ways, and compare what they compute."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lockstep.arguments import check_integer
from lockstep.verify.causes import Cause, cause_of, findings
from lockstep.verify.comparison import Difference, Run, first_difference, read_run
from lockstep.verify.ways import REFERENCE, Job, Way

AT_ONCE: Final = 2
"""The number of ways that run at the same time."""
FEWEST: Final = 2
"""The fewest updates that can be asked for: a run is killed after half of them, and resumed."""
SECONDS: Final = 600.0
"""The time after which a process is killed."""


@dataclass(frozen=True)
class Row:
    """The result of one way.

    Attributes:
        way: The way.
        difference: Where it differs from the first way; None if it does not.
        skipped: Why it was not run; empty if it was.
        updates: The number of updates that were compared.
        cause: What makes it differ; None if it does not, or if nothing was found.
    """

    way: Way
    difference: Difference | None = None
    skipped: str = ""
    updates: int = 0
    cause: Cause | None = None

    @property
    def status(self) -> str:
        """What came out: "equal", "differs" or "skipped"."""
        return "skipped" if self.skipped else "equal" if self.difference is None else "differs"


@dataclass(frozen=True)
class Report:
    """What `verify` has found.

    Attributes:
        rows: The result of each way.
        error: Why the first run could not be used; empty if it could.
        updates: The number of updates of the first run.
        seconds: The duration.
        starts: The number of starts of Python.
        findings: What is equal in all ways and probably wrong.
    """

    rows: Sequence[Row]
    error: str = ""
    updates: int = 0
    seconds: float = 0.0
    starts: int = 0
    findings: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether the bits of all ways are equal."""
        return not self.error and all(row.difference is None for row in self.rows)


class Host:
    """A process that forks the processes of jobs.

    Args:
        hash_seed: Its PYTHONHASHSEED, which a process cannot change.
    """

    def __init__(self, hash_seed: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.verify.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout

    def run(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Run jobs, and yield the name of each when all of its processes have ended."""
        pickle.dump((jobs, AT_ONCE, SECONDS), self._stdin)
        self._stdin.flush()
        for line in self._stdout:
            name = line.decode().rstrip()
            if not name:
                return
            yield name
        raise RuntimeError(f"The process that runs the ways ended with exit code {self._process.wait()}.")

    def close(self) -> None:
        """End the process."""
        self._stdin.close()
        self._process.wait()
        self._stdout.close()


def check_arguments(script: Path, updates: int) -> None:
    """Check what is to be run.

    Args:
        script: The path of the script.
        updates: The number of updates.

    Raises:
        ValueError: If the script is no file, or there are fewer than two updates.
    """
    check_integer("updates", updates, minimum=FEWEST)
    if not script.is_file():
        raise ValueError(f"`script` must be a file, got {script}.")


@contextmanager
def hosts(ways: Sequence[Way]) -> Iterator[dict[str, Host]]:
    """Start a process for each PYTHONHASHSEED of some ways; yield them by it."""
    seeds = dict.fromkeys(way.hash_seed for way in (REFERENCE, *ways))
    with ExitStack() as stack:
        yield {seed: stack.enter_context(closing(Host(seed))) for seed in seeds}


def verify(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    ways: Sequence[Way],
    updates: int = 10,
    folder: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run a script in several ways for some updates, and compare the bits of each update with the first way's.

    Args:
        script: The path of the script.
        arguments: Its arguments.
        ways: The ways to compare with the first one.
        updates: The number of updates, at least 2.
        folder: The folder for records; None for a temporary one.
        say: Called with a line about the progress.

    Returns:
        What was found.

    Raises:
        ValueError: If the script is no file, or there are fewer than two updates.
    """
    check_arguments(Path(script), updates)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as made:
        kept = str(made if folder is None else Path(folder).resolve())
        Path(kept).mkdir(parents=True, exist_ok=True)
        with hosts(ways) as started:
            verifier = Verifier(str(script), tuple(arguments), updates, kept, started, say)
            report = verifier.report(ways)
        return replace(report, seconds=time.monotonic() - begin, starts=1 + len(started))


@dataclass(frozen=True)
class Verifier:
    """Runs the ways of one script."""

    script: str
    arguments: tuple[str, ...]
    updates: int
    folder: str
    hosts: dict[str, Host]
    say: Callable[[str], None]

    def job(self, way: Way, name: str = "", **options: Any) -> Job:
        """Return a job of a way."""
        return Job(name or way.name, way, self.script, self.arguments, self.folder, self.updates, **options)

    def run(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Run jobs, and yield the name of each that has ended."""
        for seed, host in self.hosts.items():
            yield from host.run([job for job in jobs if job.way.hash_seed == seed])

    def report(self, ways: Sequence[Way]) -> Report:
        """Run all ways, and compare them."""
        begin = time.monotonic()
        list(self.run([self.job(REFERENCE)]))
        reference = self.read(REFERENCE)[0]
        if reference.error or not reference.updates:
            reason = reference.error or "it made no update with an updater of lockstep or an optimizer of PyTorch"
            for path in reference.notes.get("restored", {}):
                reason += f". It goes on from {path!r}, which an earlier run has written: verify it where there is none"
            return Report([], error=f"The script could not be run on one device: {reason}")
        skipped = {way.name: reason for way in ways if (reason := why_skipped(way, reference))}
        todo = [way for way in ways if way.name not in skipped]
        processes = sum(len(stage) for way in todo for stage in self.job(way).stages(0))
        each = time.monotonic() - begin
        self.say(f"{processes} more runs of {len(reference.updates)} updates, about {each * processes / AT_ONCE:.0f} s")
        named = {way.name: way for way in ways}
        rows = {name: Row(named[name], skipped=reason) for name, reason in skipped.items()}
        for name in self.run([self.job(way) for way in todo]):
            rows[name] = self.compare(reference, named[name])
            self.say(f"{name}: {rows[name].status}")
        ordered = self.with_causes([rows[name] for name in named])
        looked = next((self.read(way)[0] for way in todo if way.one_shard), Run())
        found = findings(reference, looked)
        return Report(ordered, updates=len(reference.updates), findings=found)

    def with_causes(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows with the cause of each difference; equal differences of several ways are looked at once."""
        known: dict[tuple[int | None, ...], Cause] = {}
        found = []
        for row in rows:
            difference = row.difference
            if difference is None or difference.what == "end" or row.cause is not None:
                found.append(row)
                continue
            if difference.what == "data":
                found.append(replace(row, cause=Cause("data")))
                continue
            place = difference.source, difference.update, difference.computation, difference.shard
            if place not in known:
                self.say(f"{row.way.name}: looking for the cause")
                known[place] = self.cause(row.way, difference)
            found.append(replace(row, cause=known[place]))
        return found

    def cause(self, way: Way, difference: Difference) -> Cause:
        """Run the first way and another one up to a difference, and return its cause."""
        ours = self.job(REFERENCE, f"cause-{REFERENCE.name}", target=difference)
        theirs = self.job(way, f"cause-{way.name}", target=difference)
        ours, theirs = (replace(each, updates=difference.update) for each in (ours, theirs))
        # The state to resume from has been written by the run that was killed.
        theirs = replace(theirs, resumes_at=max(1, self.updates // 2) if way.resumes else 0)
        last = theirs.stages(0)[-1]
        list(self.run([ours, theirs]))
        return cause_of(way, difference, read_run([ours.record])[0], read_run([job.record for job in last]))

    def read(self, way: Way) -> list[Run]:
        """Read the records of a way's processes."""
        return read_run([job.record for job in self.job(way).stages(0)[-1]])

    def compare(self, reference: Run, way: Way) -> Row:
        """Compare the records of a way with those of the first one."""
        if way.one_shard:
            return row_of(way, self.read(way)[0])
        made = self.job(way).stages(0)[-1][0].resumes_at
        for rank, run in enumerate(self.read(way)):
            found = first_difference(reference, run, made=made)
            if found is not None:
                if found.what == "end" and way.ranks > 1:
                    found = Difference("end", text=f"rank {rank} {found.text}")
                return Row(way, found)
        return Row(way, updates=len(reference.updates) - made)


def row_of(way: Way, run: Run) -> Row:
    """Return the result of comparing gradients with those of a single shard.

    Args:
        way: The way that compares them.
        run: Its record.
    """
    for found in run.compared:
        if found["status"] == "differs":
            return Row(way, Difference("one shard", update=1, tensor=found["tensor"]), cause=Cause(**found["cause"]))
    if run.error and not run.compared:
        return Row(way, Difference("end", text=f"ended before the comparison. {run.error}"))
    left_out = [found["reason"] for found in run.compared if found["status"] == "skipped"]
    if left_out or not run.compared:
        return Row(way, skipped=left_out[0] if left_out else "Only losses that updaters compute are compared.")
    return Row(way, updates=1)


def why_skipped(way: Way, reference: Run) -> str:
    """Return why a way does not apply to a script; empty if it does."""
    if way.workers and "iterator" not in reference.notes:
        return "The script has no BatchIterator."
    kinds = {record["kind"] for record in reference.updates.values()}
    sources = {source for _, source in reference.updates}
    if way.resumes and reference.notes.get("restored"):
        return "The script goes on from a snapshot of an earlier run."
    if way.resumes and (kinds != {"updater"} or len(sources) > 1):
        return "Only a run of one updater can be resumed, and only if its `update` is called, which reads the batches."
    if way.ranks > 1 and "updater" not in kinds and "updater" not in reference.notes:
        return "Only updaters share their batches between processes."
    return ""
