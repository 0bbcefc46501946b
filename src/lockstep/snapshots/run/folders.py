"""Find out which ranks see the same folder, and thereby which of them write snapshots."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from lockstep.communicators import Communicator


def first_rank_in_folder(communicator: Communicator, out: Path) -> list[int]:
    """Return for each rank the lowest rank that has the same folder. Every rank must call this.

    Args:
        communicator: The communicator of the run.
        out: The folder on this rank, which must exist.
    """
    if communicator.size == 1:
        return [0]
    # A random name, because a file of an earlier run would look like a shared folder.
    name = f".rank-{communicator.rank}-{secrets.token_hex(8)}"
    path = out / name
    path.touch(exist_ok=False)
    try:
        names = [each.decode() for each in communicator.exchange(name.encode())]
        seen = min(rank for rank, each in enumerate(names) if each == name or (out / each).exists())
        # An exchange before the file is removed: the others must have looked for it.
        return [json.loads(each) for each in communicator.exchange(json.dumps(seen).encode())]
    finally:
        path.unlink(missing_ok=True)
