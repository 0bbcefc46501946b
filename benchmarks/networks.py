"""Two machines on one: network namespaces with a cable between them that carries so many bits a second.

Needs root, `ip` and `tc` of iproute2, and a kernel with `veth` and `tbf`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
NAMED = Path("/run/netns")
PACKET = 65_536 + 4_096  # bytes that the kernel hands to a queue at once, with headers; fewer would be cut anew
BURST_SECONDS = 2e-4  # how long a cable that has rested carries more than its rate
PROBE_BYTES = 64 * 2**20

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Side:
    """One end of a network: where a process lives, and how others reach it.

    Attributes:
        namespace: By its name; None for that of this process.
        interface: The end of the cable in it.
        address: Of that.
    """

    namespace: str | None
    interface: str
    address: str


LOOPBACK = (Side(None, "lo", "127.0.0.1"), Side(None, "lo", "127.0.0.1"))


def enter(side: Side) -> None:
    """Move the calling thread, and what it starts from now on, to one side."""
    if side.namespace is None:
        return
    with (NAMED / side.namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), side.namespace)


@contextmanager
def cable(rate: float) -> Iterator[tuple[Side, Side]]:
    """Make two namespaces with a cable between them, and take them away.

    Args:
        rate: Bits a second, in each direction.

    Raises:
        RuntimeError: They cannot be made here; the message is that of the command that failed.
    """
    sides = tuple(
        Side(f"lockstep-{os.getpid()}-{letter}", f"ls{letter}", f"10.78.0.{number}")
        for number, letter in enumerate("ab", 1)
    )
    burst = max(PACKET, round(rate / 8 * BURST_SECONDS))
    try:
        for side in sides:
            _run(f"ip netns add {side.namespace}")
        first, second = sides
        _run(
            f"ip link add {first.interface} netns {first.namespace} type veth "
            f"peer name {second.interface} netns {second.namespace}"
        )
        for side in sides:
            _run(f"ip -n {side.namespace} address add {side.address}/24 dev {side.interface}")
            _run(f"ip -n {side.namespace} link set {side.interface} up")
            _run(f"ip -n {side.namespace} link set lo up")
            _run(
                f"tc -n {side.namespace} qdisc add dev {side.interface} root tbf "
                f"rate {rate:.0f}bit burst {burst}b latency 50ms"
            )
        yield first, second
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "delete", str(side.namespace)], check=False, capture_output=True)  # noqa: S603, S607 - names of our own


def _run(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)  # noqa: S603 - commands of our own
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise RuntimeError(
            f"Namespaces with a cable must be possible here, but `{command}` ended with: {said}. Run as root "
            "with iproute2, or over the loopback alone."
        ) from error


def measured_rate(sides: tuple[Side, Side]) -> float:
    """Send bytes from one side to the other, and return the bits a second that came."""
    first, second = sides
    listener = _on(first, lambda: socket.create_server((first.address, 0)))
    port = listener.getsockname()[1]
    with listener, _on(second, lambda: socket.create_connection((first.address, port), timeout=30)) as sender:
        receiver, _ = listener.accept()
        with receiver:
            sending = threading.Thread(target=sender.sendall, args=(bytes(PROBE_BYTES),))
            begin = time.perf_counter()
            sending.start()
            left = PROBE_BYTES
            while left > 0:
                left -= len(receiver.recv(min(left, 2**20)))
            seconds = time.perf_counter() - begin
            sending.join()
    return 8 * PROBE_BYTES / seconds


def _on(side: Side, make: Callable[[], Returned]) -> Returned:
    """Call a function in a thread of one side; a socket stays where it was made."""
    made: list[Returned] = []

    def call() -> None:
        enter(side)
        made.append(make())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError(f"A socket on {side.address} must be possible; the thread's traceback says why not.")
    return made[0]
