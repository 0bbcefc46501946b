"""Control messages from every rank to every rank, with room for tensors that are sent along."""

from __future__ import annotations

from typing import Final
from zlib import crc32

import torch
import torch.distributed as dist

from lockstep.communicators.transport.channel import PAIR_SIZE, Channel, spin_wait
from lockstep.errors import FaultError

SHORT_MESSAGE: Final = 4096
"""Bytes. A message up to this length is sent at once, a longer one after all ranks know the longest length."""
CHECKSUM: Final = 4
"""Bytes before each message that hold the CRC-32 of it."""
LENGTH_PREFIX: Final = 8 + CHECKSUM
"""Bytes before each message, which hold its length and its checksum."""
ROW_ALIGNMENT: Final = 64
"""Bytes. Messages and bodies begin at multiples of this, so that tensors in a body can be used in place."""


class MessageTable:
    """Memory for one message from every rank, each followed by a body of a fixed size.

    Args:
        size: The number of ranks.
        body_bytes: The size of each body in bytes, the same on every rank.
        message_bytes: The size of each message in bytes, including the prefix with its length.
    """

    def __init__(self, size: int, body_bytes: int = 0, *, message_bytes: int = LENGTH_PREFIX + SHORT_MESSAGE) -> None:
        self._message_bytes = -(-message_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._width = self._message_bytes + -(-body_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        # The tensor shares the memory of the bytearray, so that messages are read and written without tensor
        # operations.
        self._buffer = bytearray(size * self._width)
        self.body_bytes = body_bytes
        """The size of each body in bytes."""
        self.rows = torch.frombuffer(self._buffer, dtype=torch.uint8).view(size, self._width)
        """The message and the body of each rank, one row per rank."""
        self.bodies = self.rows[:, self._message_bytes : self._message_bytes + body_bytes].unbind()
        """The bytes that are sent with the message of each rank, as views."""

    def write(self, rank: int, message: bytes) -> None:
        """Write a message with its prefix into the row of a rank, as much of it as fits."""
        start = rank * self._width
        self._buffer[start : start + min(len(message), self._message_bytes)] = message[: self._message_bytes]

    def read(self, rank: int) -> tuple[int, bytes]:
        """Return the length of the message of a rank, and as much of the message as has arrived.

        Raises:
            FaultError: If the message is whole, and its checksum is not that of the rank that has sent it.
        """
        start = rank * self._width
        first = start + LENGTH_PREFIX
        length = int.from_bytes(self._buffer[start : first - CHECKSUM], "little")
        message = bytes(self._buffer[first : first + min(length, self._message_bytes - LENGTH_PREFIX)])
        sent = int.from_bytes(self._buffer[first - CHECKSUM : first], "little")
        if len(message) == length and crc32(message) != sent:
            raise FaultError(
                f"A message of rank {rank} was damaged on its way: its checksum differs. The memory of a machine or "
                "the network between them is faulty. Nothing of the update was applied. Continue from a snapshot.",
                rank=rank,
            )
        return length, message


def exchange(channel: Channel, payload: bytes, table: MessageTable | None = None) -> list[bytes]:
    """Send a message to every rank, and return the messages of all ranks in order of ranks.

    Messages are sent as bytes after their length. Nothing that arrives is executed or unpickled.

    Args:
        channel: The connection to the other ranks.
        payload: The message of this rank.
        table: The table whose bodies are sent as well: this rank's to the others, and theirs to this one. It must
            have the same size on every rank. None to send no body.
    """
    framed = len(payload).to_bytes(LENGTH_PREFIX - CHECKSUM, "little") + crc32(payload).to_bytes(CHECKSUM, "little")
    framed += payload
    heads = _exchange_once(channel, framed, MessageTable(channel.size) if table is None else table)
    longest = max(length for length, _ in heads)
    # Every rank has received the same lengths, so all of them take part in a second exchange or none does.
    if any(len(message) < length for length, message in heads):
        heads = _exchange_once(channel, framed, MessageTable(channel.size, message_bytes=LENGTH_PREFIX + longest))
    return [message for _, message in heads]


def _exchange_once(channel: Channel, framed: bytes, table: MessageTable) -> list[tuple[int, bytes]]:
    """Send a message with its body to every rank, as much of it as fits into the table."""
    table.write(channel.rank, framed)
    rows = table.rows.to(channel.message_device)
    channel.bytes_sent += rows[0].nbytes * (channel.size - 1)
    with channel.waiting():
        work = _start_exchange(channel, rows)
    # Rows on a GPU are not polled for: the host waits for them when it copies them back.
    if channel.spin_seconds and work is not None and rows is table.rows:
        spin_wait(work, channel.spin_seconds)
    channel.wait([(work, None)])
    if rows is not table.rows:
        table.rows.copy_(rows)
    return [table.read(rank) for rank in range(channel.size)]


def _start_exchange(channel: Channel, rows: torch.Tensor) -> dist.Work | None:
    """Start to send the row of this rank to the others, and to receive theirs."""
    own = rows[channel.rank]
    work: dist.Work | None
    # A single collective is used, because point-to-point messages take several times as long if cores are busy.
    if channel.size != PAIR_SIZE:
        work = dist.all_gather(list(rows.unbind()), own, group=channel.group, async_op=True)
    else:
        # This rank sends nothing to itself and everything to the other rank, which copies nothing, unlike all_gather.
        other = 1 - channel.rank
        splits = [0, 0]
        splits[other] = own.numel()
        work = dist.all_to_all_single(rows[other], own, splits, splits, group=channel.group, async_op=True)
    return work
