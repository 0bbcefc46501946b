"""The ways in which `lockstep verify` runs a script, which must all give the same bits, and the process of each run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lockstep.verify.comparison import Difference

HASH_SEED: Final = "20111"
"""The PYTHONHASHSEED of the way of that name; the others have 0, so that sets of strings have one order in them."""
LATER: Final = 3
"""Intra-op threads of the way that starts later; torch's default is the number of cores."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a script.

    Attributes:
        name: The name on the command line.
        meaning: What differs from the first way, for the table.
        devices: The number of devices per process.
        ranks: The number of processes.
        reverse: Whether devices compute one after another, the last one first.
        workers: The number of processes that load samples.
        hash_seed: The PYTHONHASHSEED of the process.
        fills: Whether fresh memory is filled with NaN while shards and optimizers compute.
        threads: The number of intra-op threads outside of updates; None for torch's default.
        resumes: Whether the process is killed in the middle, and another one resumes.
        one_shard: Whether the gradient of the first batch is compared with that of the batch as a single shard.
    """

    name: str
    meaning: str
    devices: int = 1
    ranks: int = 1
    reverse: bool = False
    workers: int = 0
    hash_seed: str = "0"
    fills: bool = False
    threads: int | None = None
    resumes: bool = False
    one_shard: bool = False


REFERENCE: Final = Way("one-device", "one device, no worker processes")
WAYS: Final = (
    Way("two-devices", "two devices, in two threads", devices=2),
    Way("three-devices", "three devices, in three threads", devices=3),
    Way("reverse", "four devices, the last shards first", devices=4, reverse=True),
    Way("processes", "two processes, each on one device", ranks=2),
    Way("workers", "samples loaded by two processes", workers=2),
    Way("hash-seed", "another PYTHONHASHSEED", hash_seed=HASH_SEED),
    Way("memory", "fresh memory filled with NaN", fills=True),
    Way("later", "another start and number of threads", threads=LATER),
    Way("resume", "killed in the middle and resumed", resumes=True),
    Way("one-shard", "the first batch as a single shard, in float64", one_shard=True),
)
"""The ways that are compared with `REFERENCE`, in the order of the table."""


def chosen(only: Collection[str] = (), skip: Collection[str] = ()) -> Sequence[Way]:
    """Return the ways to compare with the first one.

    Args:
        only: The names of the ways to keep; empty for all.
        skip: The names of ways to leave out.

    Raises:
        ValueError: If there is no way of a name, or if none is left.

    >>> [way.name for way in chosen(only=["workers", "memory"], skip=["memory"])]
    ['workers']
    """
    names = [way.name for way in WAYS]
    for option, given in (("only", only), ("skip", skip)):
        for name in given:
            if name not in names:
                raise ValueError(f"`{option}` must hold names of {', '.join(names)}, got {name!r}.")
    left = [way for way in WAYS if way.name not in skip and (not only or way.name in only)]
    if not left:
        raise ValueError("`only` and `skip` must leave at least one way, got none.")
    return left


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
        target: Where two runs differ, of which this one writes down what is computed there; None for nowhere.
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
    target: Difference | None = None

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
