"""Copy tensors from one rank to all, or add them up in the transport's order: torch's own collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from lockstep.communicators.transport.channel import Channel, Works

PACKET: Final = 2**25
"""Bytes. Tensors are sent together up to this length."""
LONG: Final = 2**18
"""Bytes. To add up tensors from this length on where they lie costs less than to copy them together."""


def plan_packets(like: Sequence[torch.Tensor], order: Iterable[int], *, limit: int, alone: int) -> list[list[int]]:
    """Return which tensors travel together, in the order in which they go out.

    Only sizes, dtypes and devices count: ranks that hold the same tensors, however they lie in memory, plan
    the same packets. An empty tensor is in none.

    Args:
        like: Tensors of these sizes, dtypes and devices.
        order: Indices of those that travel, in the order in which they are there.
        limit: Bytes. Short tensors of one device and dtype travel together up to this length.
        alone: Bytes. Tensors from this length on travel alone.

    >>> like = [torch.empty(4), torch.empty(100_000), torch.empty(2)]
    >>> plan_packets(like, [2, 1, 0], limit=LONG, alone=LONG)
    [[1], [2, 0]]
    """
    packets: list[list[int]] = []
    waiting: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    lengths: dict[tuple[torch.device, torch.dtype], int] = {}
    for index in order:
        tensor = like[index]
        length, kind = tensor.nbytes, (tensor.device, tensor.dtype)
        if length >= alone:
            packets.append([index])
        elif length:
            if kind in waiting and lengths[kind] + length > limit:
                packets.append(waiting.pop(kind))
            lengths[kind] = length + (lengths[kind] if kind in waiting else 0)
            waiting.setdefault(kind, []).append(index)
    return [*packets, *waiting.values()]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of a packet as one flat tensor: a view of a lone one without gaps, else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write what a packet holds to its tensors, unless it lies in their memory."""
    if flat.data_ptr() != tensors[0].data_ptr():
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), shaped)


@torch.no_grad()
def broadcast(channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copy tensors from one rank to all others."""
    for indices in plan_packets(tensors, range(len(tensors)), limit=PACKET, alone=PACKET):
        packet = [tensors[index] for index in indices]
        # Never where a tensor lies: by its version counter others notice that it was written to.
        flat = torch.cat([tensor.reshape(-1) for tensor in packet])
        # As bytes: some backends know only some dtypes.
        work = dist.broadcast(flat.view(torch.uint8), group=channel.group, group_src=source, async_op=True)
        channel.wait([(work, source)])
        if channel.rank != source:
            unpack(flat, packet)


def begin_all_reduce(channel: Channel, flats: Sequence[torch.Tensor]) -> Works:
    """Begin to add up flat tensors over ranks, each by itself and in place."""
    with channel.waiting():
        # As a ring sends, which is what backends make of long tensors.
        channel.bytes_sent += sum(2 * (channel.size - 1) * flat.nbytes // channel.size for flat in flats)
        return [(dist.all_reduce(flat, group=channel.group, async_op=True), None) for flat in flats]


@torch.no_grad()
def all_reduce(channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
    """Add up tensors over ranks in place, in the order of the transport; long ones where they lie."""
    plan = plan_packets(tensors, range(len(tensors)), limit=PACKET, alone=LONG)
    packets = [[tensors[index] for index in indices] for indices in plan]
    flats = [pack(packet) for packet in packets]
    channel.wait(begin_all_reduce(channel, flats))
    for packet, flat in zip(packets, flats, strict=True):
        unpack(flat, packet)
