"""Emulate two machines on one, by network namespaces that are connected with a limited bandwidth.

It requires root, `ip` and `tc` of iproute2, and a kernel with `veth` and `tbf`.
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
NAMESPACES = Path("/run/netns")
PACKET_BYTES = 65_536 + 4_096  # the largest packet that the kernel queues at once, with headers
BURST_SECONDS = 2e-4  # the time for which an idle connection may exceed its rate
PROBE_BYTES = 64 * 2**20

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Side:
    """One end of a network connection: a process in its namespace, and its address.

    Attributes:
        namespace: The name of the namespace; None for that of this process.
        interface: The network interface in the namespace.
        address: The IP address of the interface.
    """

    namespace: str | None
    interface: str
    address: str


LOOPBACK = (Side(None, "lo", "127.0.0.1"), Side(None, "lo", "127.0.0.1"))


def enter(side: Side) -> None:
    """Move the current thread, and the threads and processes that it starts, to a namespace."""
    if side.namespace is None:
        return
    # `setns` applies to the calling thread alone; Python has had it only since 3.12.
    with (NAMESPACES / side.namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), side.namespace)


@contextmanager
def cable(rate: float) -> Iterator[tuple[Side, Side]]:
    """Create two connected namespaces, and remove them at the end of the ``with`` block.

    Args:
        rate: The bandwidth in bits per second, in each direction.

    Raises:
        RuntimeError: If they cannot be created; the message is that of the command that failed.
    """
    sides = tuple(
        Side(f"lockstep-{os.getpid()}-{letter}", f"ls{letter}", f"10.78.0.{number}")
        for number, letter in enumerate("ab", 1)
    )
    # A smaller bucket than the largest packet would split packets and slow the connection down.
    burst = max(PACKET_BYTES, round(rate / 8 * BURST_SECONDS))
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
        # Removing a namespace removes its interfaces too; one that was never created is no error.
        for side in sides:
            subprocess.run(["ip", "netns", "delete", str(side.namespace)], check=False, capture_output=True)  # noqa: S603, S607 - our own names


def _run(command: str) -> None:
    """Run a command, and raise an error with its output if it fails."""
    try:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)  # noqa: S603 - our own commands
    except (OSError, subprocess.CalledProcessError) as error:
        output = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise RuntimeError(
            f"Connected network namespaces must be available, but `{command}` failed with: {output}. Run as root "
            "with iproute2, or use only the loopback network."
        ) from error


def measured_rate(sides: tuple[Side, Side]) -> float:
    """Send data from one side to the other, and return the rate in bits per second."""
    first, second = sides
    listener = _on(first, lambda: socket.create_server((first.address, 0)))
    port = listener.getsockname()[1]
    with listener, _on(second, lambda: socket.create_connection((first.address, port), timeout=30)) as sender:
        receiver, _ = listener.accept()
        with receiver:
            # In a thread, because the buffers of the sockets hold less than is sent.
            sending = threading.Thread(target=sender.sendall, args=(bytes(PROBE_BYTES),))
            begin = time.perf_counter()
            sending.start()
            left = PROBE_BYTES
            while left > 0:
                left -= len(receiver.recv(min(left, 2**20)))
            seconds = time.perf_counter() - begin
            sending.join()
    return 8 * PROBE_BYTES / seconds


def _on(side: Side, create: Callable[[], Returned]) -> Returned:
    """Call a function in a thread of one side; a socket that it creates stays in that namespace."""
    created: list[Returned] = []

    def call() -> None:
        enter(side)
        created.append(create())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if not created:
        raise RuntimeError(f"A socket on {side.address} must be available; see the traceback of the thread.")
    return created[0]
