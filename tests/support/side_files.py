"""Small runs with every file beside the snapshots, and what may happen to these files."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.extensions import CSVLogger, LogReport, RunRecord
from lockstep.trainer import WRITER
from tests.support.resuming import PatientSnapshot, Place, mlp

NAMES = ["log.jsonl", "metrics.csv", "metrics.json", "run.jsonl", "digests.jsonl"]
LINES = [name for name in NAMES if name != "metrics.json"]
UPDATES = 8


def build(out: Path, updates: int = UPDATES, *, at: dict[int, Callable[[], object]] | None = None) -> ls.Trainer:
    """Build a run; the functions `at` are called in these updates, before anything is logged."""
    updater = mlp(Place(1, 1, 0), ls.LocalCommunicator())
    trainer = ls.Trainer(updater, (updates, "update"), out)
    trainer.extend(lambda trainer: (at or {}).get(trainer.updater.iteration, int)(), name="at", priority=WRITER)
    trainer.extend(LogReport(trigger=(1, "update")))
    trainer.extend(CSVLogger(trigger=(1, "update")))
    trainer.extend(RunRecord(trigger=(1, "update")))
    trainer.extend(PatientSnapshot(keep=100, digest_every=1), trigger=(4, "update"))
    return trainer


def stopped(out: Path, at: int = 7) -> ls.Trainer:
    """Stop a run by an error in an update; its last snapshot is one of update 4."""

    def stop() -> None:
        raise ConnectionError("stopped")

    trainer = build(out, at={at: stop})
    with pytest.raises(ConnectionError):
        trainer.run()
    return trainer


def timeless(out: Path) -> dict[str, Any]:
    """Return what is equal in the files of equal runs."""
    lines = (out / "log.jsonl").read_text().splitlines()
    return {
        "log": [{name: value for name, value in json.loads(line).items() if name != "elapsed_time"} for line in lines],
        "csv": (out / "metrics.csv").read_bytes(),
        "json": (out / "metrics.json").read_bytes(),
        "digests": ls.snapshots.read_digest_log(out),
    }


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in NAMES}


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond a size, so that writes are short and then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def plant(path: Path, kind: str, target: Path) -> None:
    """Put something that is no regular file at a path."""
    path.unlink(missing_ok=True)
    if kind == "a link":
        path.symlink_to(target)
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            # By the descriptor of the folder, because the path may be too long for an address.
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)


KINDS = ["a link", "a FIFO", "a folder"] + (["a socket"] if sys.platform == "linux" else [])
FRAGMENTS = [b"1e999", b"[" * 20_000, b"\x00", b"\xff\xfe", b"NaN", b"null", b"{}", b"\n", b'"', b",", b"-", b"9" * 400]


def mutated(data: bytes, seed: int) -> bytes:
    """Return damaged content: bits, bytes, lines and fragments are changed, removed, repeated or added."""
    draw = random.Random(seed)  # noqa: S311 - a choice of damage
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(7)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at:at] = draw.choice(FRAGMENTS)
        elif kind == 2:
            del found[at : at + draw.randrange(1, 40)]
        elif kind == 3:
            found[at:at] = found[max(0, at - draw.randrange(1, 300)) : at]
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            end = at + draw.randrange(1, 12)
            found[at:end] = draw.choice(FRAGMENTS)
        else:
            lines = bytes(found).splitlines(keepends=True)
            draw.shuffle(lines)
            found = bytearray(b"".join(lines))
    return bytes(found)
