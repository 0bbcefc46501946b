"""Describe what a machine offers: processor, memory, devices, torch, the network and the disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import statistics
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from lockstep._version import __version__
from lockstep.communicators import kernel_class
from lockstep.portable import PORTABLE_ENV, is_portable, machine_problem
from lockstep.replicas import parse_devices, usable_cores

Facts: TypeAlias = dict[str, str]
"""What is known, as text by name."""

COMPILERS: Final = ("c++", "g++", "clang++")
SYNCS: Final = 5
"""The number of times that a file is synchronized with the disk; the median counts."""
BLOCK: Final = bytes(4096)
UNKNOWN: Final = "unknown"
CORES: Final = Path("/proc/cpuinfo")
MEMORY: Final = Path("/proc/meminfo")


def describe_machine(folder: Path) -> dict[str, Facts]:
    """Return what the machine offers, by topic.

    Args:
        folder: The folder for snapshots, in which a small file is written and removed.
    """
    try:
        devices = parse_devices("auto")
        auto = ", ".join(map(str, devices))
    except ValueError as error:
        devices, auto = [], f"refused: {error}"
    return {
        "processor": _processor(),
        "devices": {'devices="auto"': auto},
        # Where these are equal, bits are.
        "kernels": {name: value for name, value in kernel_class(devices).items() if value},
        "torch": _torch(),
        "network": _network(),
        f"disk ({folder})": _disk(folder),
    }


def core_quota(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Return the number of cores that a container may keep busy; None if there is no limit.

    Args:
        limit: The file in which Linux has it.
    """
    found = re.fullmatch(r"(\d+) (\d+)\n?", read(limit))
    return int(found[1]) / int(found[2]) if found else None


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system of a folder.

    Args:
        folder: The folder.
        mounts: The file in which Linux lists what is mounted.
    """
    listed = re.findall(r"^\S+ (\S+) (\S+)", read(mounts), re.MULTILINE)
    found = [(len(place), kind) for place, kind in listed if folder.resolve().is_relative_to(place)]
    return max(found, key=itemgetter(0), default=(0, UNKNOWN))[1]


def _processor() -> Facts:
    quota, about = core_quota(), read(MEMORY)
    name = re.search(r"^model name\s*: (.+)$", read(CORES), re.MULTILINE)
    total, free = (re.search(rf"^{each}:\s+(\d+) kB$", about, re.MULTILINE) for each in ("MemTotal", "MemAvailable"))
    cores = f"{usable_cores()} of {os.cpu_count()}"
    return {
        "name": name[1] if name else platform.processor() or platform.machine(),
        "portable": "portable kernels are in use, and gave the bits that were recorded"
        if is_portable()
        else machine_problem() or f"possible: start with {PORTABLE_ENV}=1 to check it and to use them",
        "cores usable": cores if quota is None else f"{cores}, limited to the time of {quota:g}",
        "memory": f"{int(free[1]) / 2**20:.1f} of {int(total[1]) / 2**20:.1f} GiB available"
        if total and free
        else UNKNOWN,
    }


def read(path: Path) -> str:
    """Return the text of a file of the system; empty if there is no such file.

    Args:
        path: The file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _torch() -> Facts:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    return {
        "versions": f"lockstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "threads": f"{torch.get_num_threads()} within and {torch.get_num_interop_threads()} between operations; "
        "lockstep uses one per device",
        "C++ compiler": compiler or "none (needed by torch.compile and by the tests of the emulated accelerator)",
    }


def _network() -> Facts:
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "by the host name, unless lockstep run is used on one machine")
    return {
        "interfaces": interfaces,
        "backends": ", ".join(backends) or "none",
        "gloo uses": chosen,
        "host name": f"{socket.gethostname()}, {host_address() or 'which has no address'}",
    }


def host_address() -> str | None:
    """Return the address of this machine's host name; None if the name has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists: a run creates its folder.

    Args:
        folder: The folder.
    """
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _disk(folder: Path) -> Facts:
    folder = existing(folder)
    try:
        free = shutil.disk_usage(folder).free
        seconds = statistics.median(_sync_seconds(folder) for _ in range(SYNCS))
    except OSError as error:
        return {"writable": f"no: {error.strerror}", "file system": file_system(folder)}
    return {
        "writable": "yes",
        "file system": file_system(folder),
        "free": f"{free / 2**30:.1f} GiB",
        "fsync of 4 KiB": f"{seconds * 1e3:.2f} ms",
    }


def _sync_seconds(folder: Path) -> float:
    with NamedTemporaryFile(dir=folder, prefix=".lockstep-doctor-") as file:
        start = time.perf_counter()
        file.write(BLOCK)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start


def kernel_variables(variables: Mapping[str, str]) -> Facts:
    """Return the environment variables that choose kernels."""
    return {name[1:]: value for name, value in kernel_class([], variables).items() if name.startswith("$")}
