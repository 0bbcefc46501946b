"""The program `signalled` as ranks of `lockstep.launch`: ``launched.py PROCESSES OUT UPDATES [POINT:UPDATE]...``."""

from __future__ import annotations

import sys

import lockstep as ls
from tests.support.zygote import spawned_by_forks


def main(out: str, updates: str, *points: str) -> None:
    # In the process of a rank, because the program reads which one it is.
    from tests.support.programs import signalled  # noqa: PLC0415

    signalled.main(out.format(rank=signalled.RANK), int(updates), list(points))


if __name__ == "__main__":
    with spawned_by_forks():
        ls.launch(main, int(sys.argv[1]), args=sys.argv[2:])
