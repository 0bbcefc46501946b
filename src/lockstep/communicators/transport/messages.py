"""Small messages from every rank to every rank, with room for numbers that travel along."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from lockstep.communicators.transport.channel import PAIR, Channel, spin_wait

SHORT: Final = 4096
"""Bytes. Messages up to this length travel at once, longer ones after all ranks know the longest."""
LENGTH: Final = 8
"""Bytes that say how long a message is."""
ALIGNMENT: Final = 64
"""Bytes. A head and its body begin at multiples of this, so that numbers can be read where they lie."""


class Table:
    """Memory for one message of every rank, each with a body of so many bytes.

    Args:
        size: How many ranks there are.
        room: Bytes of each body, the same on every rank.
        head: Bytes of each message with its length before it.
    """

    def __init__(self, size: int, room: int = 0, *, head: int = LENGTH + SHORT) -> None:
        self._head = -(-head // ALIGNMENT) * ALIGNMENT
        self._width = self._head + -(-room // ALIGNMENT) * ALIGNMENT
        self._buffer = bytearray(size * self._width)
        self.room = room
        """Bytes of each body."""
        self.rows = torch.frombuffer(self._buffer, dtype=torch.uint8).view(size, self._width)
        """The message of each rank with its body."""
        self._bodies = self.rows[:, self._head : self._head + room].unbind()

    def body(self, rank: int) -> torch.Tensor:
        """Give the bytes that travel with a rank's message."""
        return self._bodies[rank]

    def write(self, rank: int, message: bytes) -> None:
        """Put the beginning of a message to a rank's place."""
        start = rank * self._width
        self._buffer[start : start + min(len(message), self._head)] = message[: self._head]

    def read(self, rank: int) -> tuple[int, bytes]:
        """Give the length of a rank's message, and as much of it as there is."""
        start = rank * self._width
        first = start + LENGTH
        length = int.from_bytes(self._buffer[start:first], "little")
        return length, bytes(self._buffer[first : first + min(length, self._head - LENGTH)])


def exchange(channel: Channel, payload: bytes, table: Table | None = None) -> list[bytes]:
    """Send a message to every rank and give those of all, in order of ranks.

    What travels is bytes with their number before them; nothing that arrives is run or unpickled.

    Args:
        channel: Joins the ranks.
        payload: The message.
        table: Whose bodies travel as well, this rank's to the others; of the same size on every rank.
    """
    framed = len(payload).to_bytes(LENGTH, "little") + payload
    heads = _round(channel, framed, Table(channel.size) if table is None else table)
    longest = max(length for length, _ in heads)
    if any(len(message) < length for length, message in heads):
        heads = _round(channel, framed, Table(channel.size, head=LENGTH + longest))
    return [message for _, message in heads]


def _round(channel: Channel, framed: bytes, table: Table) -> list[tuple[int, bytes]]:
    """Send a message to every rank as far as there is room, with its body."""
    table.write(channel.rank, framed)
    rows = table.rows.to(channel.message_device)
    channel.bytes_sent += rows[0].nbytes * (channel.size - 1)
    with channel.waiting():
        work = _send(channel, rows)
    if channel.looks and work is not None and rows is table.rows:
        spin_wait(work, channel.looks)
    channel.wait([(work, None)])
    if rows is not table.rows:
        table.rows.copy_(rows)
    return [table.read(rank) for rank in range(channel.size)]


def _send(channel: Channel, rows: torch.Tensor) -> dist.Work | None:
    """Begin to send this rank's row to the others and to receive theirs.

    That is one collective: messages from rank to rank take several times as long where cores are busy.
    """
    own = rows[channel.rank]
    work: dist.Work | None
    if channel.size != PAIR:
        work = dist.all_gather(list(rows.unbind()), own, group=channel.group, async_op=True)
    else:
        # Nothing for oneself, all for the other: unlike all_gather, this copies nothing on its way.
        other = 1 - channel.rank
        splits = [0, 0]
        splits[other] = own.numel()
        work = dist.all_to_all_single(rows[other], own, splits, splits, group=channel.group, async_op=True)
    return work
