"""One run of a script in one way, as the process that makes it is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.verify.ways import Way


@dataclass(frozen=True, slots=True)
class Target:
    """What to look at more closely, where two runs were found to differ.

    Attributes:
        source: The updater or optimizer, counted in the order of their first updates.
        update: The update, 1 for the first one.
        computation: The gradient of the update, 1 for the first one; None for the step of the optimizers.
        shard: The shard; None for the step.
    """

    source: int
    update: int
    computation: int | None = None
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One process that runs the script.

    Attributes:
        name: The name of its files in `folder`.
        way: How it runs the script.
        script: The path of the script.
        arguments: The script's arguments.
        folder: The folder for records, output and what the trainer of the script writes.
        updates: The number of updates after which it ends.
        rank: The index of the process, of those of its way.
        port: The port at which processes of its way meet; 0 for a single process.
        dies_at: The number of updates after which it is killed; 0 for never.
        resumes_at: The number of updates that an earlier process has made; 0 for none.
        target: What to look at more closely; None for nothing.
    """

    name: str
    way: Way
    script: str
    arguments: tuple[str, ...]
    folder: str
    updates: int
    rank: int = 0
    port: int = 0
    dies_at: int = 0
    resumes_at: int = 0
    target: Target | None = None

    @property
    def record(self) -> Path:
        """The file for the records."""
        return Path(self.folder, f"{self.name}.jsonl")

    @property
    def output(self) -> Path:
        """The file for what the script prints."""
        return Path(self.folder, f"{self.name}.txt")

    def stages(self, port: int) -> list[list[Job]]:
        """Return the processes of this job's way: those of a stage run together, and stages one after another.

        Args:
            port: A free port, for a way of several processes.
        """
        if self.way.ranks > 1:
            ranks = range(self.way.ranks)
            return [[replace(self, name=f"{self.name}-{rank}", rank=rank, port=port) for rank in ranks]]
        if self.way.resumes and not self.resumes_at:
            middle = max(1, self.updates // 2)
            killed = replace(self, name=f"{self.name}-killed", dies_at=middle)
            return [[killed], [replace(self, resumes_at=middle)]]
        return [[self]]
