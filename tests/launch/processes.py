"""What processes there are and where they listen, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def children(of: int | None = None) -> list[int]:
    """List the children of a process, by default of this one; ended ones that nobody waited for count too."""
    parent = os.getpid() if of is None else of
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if not _is_tracker(pid)]


def _is_tracker(pid: str) -> bool:
    """Tell Python's own helper, which multiprocessing starts once and keeps."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def descendants(of: int) -> list[int]:
    """List the children of a process, theirs, and so on."""
    return [pid for child in children(of) for pid in (child, *descendants(child))]


def listening(pid: int) -> set[str]:
    """Give the addresses that a process listens on over TCP."""
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == LISTEN and f"socket:[{line.split()[9]}]" in sockets:
                addresses.add(_address(local.partition(":")[0]))
    return addresses


def _address(text: str) -> str:
    """Read the hexadecimal form, which has the bytes of each 32-bit word in the machine's order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed))
