"""Copy tensors from one rank to all, or add them up in the transport's order: torch's own collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

from lockstep.communicators.channel import Channel

PACKET: Final = 2**25
"""Bytes. Tensors are sent together up to this length."""
LONG: Final = 2**18
"""Bytes. To add up tensors from this length on where they lie costs less than to copy them together."""


@torch.no_grad()
def broadcast(channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copy tensors from one rank to all others."""
    for packet in _packets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in packet])
        # As bytes: some backends know only some dtypes.
        work = dist.broadcast(flat.view(torch.uint8), group=channel.group, group_src=source, async_op=True)
        channel.wait([(work, source)])
        if channel.rank != source:
            _unpack(flat, packet)


@torch.no_grad()
def all_reduce(channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
    """Add up tensors over ranks in place, in the order of the transport; long ones where they lie."""
    long = [tensor for tensor in tensors if tensor.nbytes >= LONG and tensor.is_contiguous()]
    known = set(map(id, long))
    packets = [[tensor] for tensor in long]
    packets += _packets([tensor for tensor in tensors if id(tensor) not in known])
    flats = [torch.cat([tensor.reshape(-1) for tensor in packet]) for packet in packets[len(long) :]]
    flats = [tensor.detach().view(-1) for tensor in long] + flats
    with channel.waiting():
        # As a ring sends, which is what backends make of long tensors.
        channel.bytes_sent += sum(2 * (channel.size - 1) * flat.nbytes // channel.size for flat in flats)
        works = [dist.all_reduce(flat, group=channel.group, async_op=True) for flat in flats]
    for packet, flat, work in zip(packets, flats, works, strict=True):
        channel.wait([(work, None)])
        if id(packet[0]) not in known:
            _unpack(flat, packet)


def _packets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Put tensors together by device and dtype, up to the length of a packet."""
    packets: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        packet = packets[tensor.device, tensor.dtype]
        if packet and sum(each.nbytes for each in packet) + tensor.nbytes > PACKET:
            yield list(packet)
            packet.clear()
        packet.append(tensor)
    yield from packets.values()


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write what a packet holds to its tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
