"""Two machines: two network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Machine(NamedTuple):
    """A machine, which has its own addresses, interfaces and ports, but shares its name and processes with all."""

    namespace: str
    address: str
    interface: str


FIRST = Machine(f"lockstep-{os.getpid()}-a", "10.77.0.1", "lsa")
SECOND = Machine(f"lockstep-{os.getpid()}-b", "10.77.0.2", "lsb")
MACHINES = (FIRST, SECOND)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)


@contextmanager
def two_machines() -> Iterator[None]:
    """Make the machines, and take them away. A test that may not do that is skipped, which is no pass."""
    if shutil.which("ip") is None:
        pytest.skip("not run: iproute2 is not installed")
    try:
        for each in MACHINES:
            ip("netns", "add", each.namespace)
        cable = f"link add {FIRST.interface} netns {FIRST.namespace} type veth"
        ip(*f"{cable} peer name {SECOND.interface} netns {SECOND.namespace}".split())
        for each in MACHINES:
            ip("-n", each.namespace, "address", "add", f"{each.address}/24", "dev", each.interface)
            set_link(each, "up")
            ip("-n", each.namespace, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove()
        pytest.skip(f"not run: no network namespaces here: {error.stderr.decode().strip()}")
    try:
        yield
    finally:
        _remove()


def set_link(machine: Machine, state: str) -> None:
    """Plug the cable in ("up"), or pull it out ("down")."""
    ip("-n", machine.namespace, "link", "set", machine.interface, state)


def _remove() -> None:
    for each in MACHINES:
        subprocess.run(["ip", "netns", "delete", each.namespace], check=False, capture_output=True, timeout=240)
