"""What processes there are and where they listen, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")  # noqa: S108 - where the system keeps it
SHARED_PROCESSES = {None, b"zygote\n", b"rank_pool\n"}
"""The names that `tests.support.zygote` and `tests.support.rank_pool` give their processes; None is one that ended."""
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def children(of: int | None = None) -> list[int]:
    """List the children of a process, by default of this one; ended ones that nobody waited for count too."""
    parent = os.getpid() if of is None else of
    pids = _read(f"/proc/{parent}/task/{parent}/children") or b""
    return [int(pid) for pid in pids.split() if _counts(int(pid))]


def _counts(pid: int) -> bool:
    """Leave out Python's own helpers, which multiprocessing starts once and keeps, and processes that tests share."""
    command, name = _read(f"/proc/{pid}/cmdline"), _read(f"/proc/{pid}/comm")
    helper = command is not None and (b"resource_tracker" in command or b"multiprocessing.forkserver" in command)
    return command is not None and not helper and name not in SHARED_PROCESSES


def _read(path: str) -> bytes | None:
    """Read what the system says of a process; None of one that is gone meanwhile."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(of: int) -> list[int]:
    """List the children of a process, theirs, and so on."""
    return [pid for child in children(of) for pid in (child, *descendants(child))]


def left_in_memory() -> set[str]:
    """List the files and semaphores of shared memory that no process has in use."""
    inodes = {entry.name: entry.inode() for entry in os.scandir(SHARED)}
    used = _used_inodes()
    return {name for name, inode in inodes.items() if inode not in used}


def _used_inodes() -> set[int]:
    """Read what processes have mapped; a semaphore is mapped under a name that it had before."""
    inodes = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        # It has ended meanwhile, or is the system's.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            lines = path.read_text().splitlines()
            inodes.update(int(line.split()[4]) for line in lines if f" {SHARED}/" in line)
    return inodes


def listening(pid: int) -> set[str]:
    """Give the addresses that a process listens on over TCP."""
    return {address for address, _ in listening_at(pid)}


def listening_at(pid: int) -> set[tuple[str, int]]:
    """Give the addresses and ports that a process listens on over TCP."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed meanwhile
            sockets.add(str(path.readlink()))
    places = set()
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
                address, _, port = local.partition(":")
                places.add((_address(address), int(port, 16)))
    return places


def _address(text: str) -> str:
    """Read the hexadecimal form, which has the bytes of each 32-bit word in the machine's order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed))
