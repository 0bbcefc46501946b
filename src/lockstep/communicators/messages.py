"""Small messages from every rank to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators.channel import Channel

SHORT: Final = 4096
"""Bytes. Messages up to this length travel at once, longer ones after all ranks know the longest."""
LENGTH: Final = 8
"""Bytes that say how long a message is."""
MESSAGE: Final = 0
"""The tag of messages."""


def exchange(channel: Channel, payload: bytes, bodies: Sequence[torch.Tensor] = ()) -> list[bytes]:
    """Send a message to every rank and give those of all, in order of ranks.

    What travels is bytes with their number before them; nothing that arrives is run or unpickled.

    Args:
        channel: Joins the ranks.
        payload: The message.
        bodies: Nothing, or for every rank a tensor that travels with its message: this rank's is sent, the
            others' are written to.
    """
    framed = len(payload).to_bytes(LENGTH, "little") + payload
    received = _round(channel, framed, LENGTH + SHORT, bodies)
    lengths = [int.from_bytes(head[:LENGTH], "little") for head in received]
    if max(lengths) > SHORT:
        received = _round(channel, framed, LENGTH + max(lengths))
    return [message[LENGTH : LENGTH + length] for message, length in zip(received, lengths, strict=True)]


def _round(channel: Channel, message: bytes, width: int, bodies: Sequence[torch.Tensor] = ()) -> list[bytes]:
    """Send so many bytes of a message to every rank, directly: one journey, however many ranks there are."""
    buffers = [bytearray(width) for _ in range(channel.size)]
    buffers[channel.rank][: len(message)] = message[:width]
    on_host = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
    rooms = [each.to(channel.message_device) for each in on_host]
    mine = rooms[channel.rank]
    others = [(room, rank) for rank, room in enumerate(rooms) if rank != channel.rank]
    sends = [(mine, rank) for _, rank in others]
    if bodies:
        sends += [(bodies[channel.rank], rank) for _, rank in others if bodies[channel.rank].numel()]
        others += [(bodies[rank], rank) for _, rank in others if bodies[rank].numel()]
    posted = channel.post(sends, others, MESSAGE)
    channel.wait(posted.incoming)
    channel.wait(posted.outgoing)
    for each, room in zip(on_host, rooms, strict=True):
        if room is not each:
            each.copy_(room)
    return [bytes(buffer) for buffer in buffers]
