"""Transfers of lists of tensors: broadcast, a gather from owners, and sums in the order of the transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from lockstep.communicators.transport.channel import Channel, PostedWork, Works

OWNED_TAG: Final = 3
"""The tag of tensors that their owners send."""
PACKET_BYTES: Final = 2**25
"""Bytes. Tensors are sent together up to this total length."""
HOST: Final = torch.device("cpu")
LONG_TENSOR_BYTES: Final = 2**18
"""Bytes. A tensor of this length or more is summed in place, which costs less than copying it into a packet."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a flat tensor that a plan depends on.

    Attributes:
        size: The number of elements.
        dtype: The dtype of the tensor.
        device: The device of the tensor.
    """

    size: int
    dtype: torch.dtype
    device: torch.device = HOST

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self.size * self.dtype.itemsize


def plan_packets(
    like: Sequence[torch.Tensor | TensorSpec], order: Iterable[int], *, limit: int, alone: int
) -> list[list[int]]:
    """Return which tensors are sent together, in the order in which they are sent.

    Only sizes, dtypes and devices count: ranks with the same tensors plan the same packets, whatever the strides.
    Empty tensors are left out.

    Args:
        like: Tensors that have the sizes, dtypes and devices of those to send.
        order: The indices of the tensors to send, in the order in which they become available.
        limit: The longest packet in bytes. Short tensors of one device and dtype are sent together up to it.
        alone: The length in bytes from which on a tensor is sent in a separate packet.

    >>> like = [torch.empty(4), torch.empty(100_000), torch.empty(2)]
    >>> plan_packets(like, [2, 1, 0], limit=LONG_TENSOR_BYTES, alone=LONG_TENSOR_BYTES)
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
    # Dictionaries keep the order of insertion, so the last packets come in the same order on every rank.
    return [*packets, *waiting.values()]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of a packet as one flat tensor.

    It is a view if the packet holds a single contiguous tensor, and otherwise a copy.
    """
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor to the tensors of a packet, unless they share its memory."""
    if flat.data_ptr() != tensors[0].data_ptr():
        if flat.device != tensors[0].device:
            # One transfer instead of one per tensor.
            flat = flat.to(tensors[0].device, non_blocking=True)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), shaped)


@torch.no_grad()
def broadcast(channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copy tensors from one rank to all others.

    Args:
        channel: The connection to the other ranks.
        tensors: The tensors, of the same sizes, dtypes and devices on every rank. Changed in place except on
            `source`.
        source: The rank that the tensors are copied from.
    """
    for indices in plan_packets(tensors, range(len(tensors)), limit=PACKET_BYTES, alone=PACKET_BYTES):
        packet = [tensors[index] for index in indices]
        # `pack` must not be used here: a tensor that is received in place keeps its version counter, and code that
        # compares version counters would miss the write.
        flat = channel.reachable(torch.cat([tensor.reshape(-1) for tensor in packet]))
        # The elements are sent as bytes, because some backends support only some dtypes.
        work = dist.broadcast(flat.view(torch.uint8), group=channel.group, group_src=source, async_op=True)
        channel.wait([(work, source)])
        if channel.rank != source:
            unpack(flat, packet)


def begin_all_reduce(channel: Channel, flats: Sequence[torch.Tensor]) -> Works:
    """Start to sum flat tensors over ranks in place, each by a separate collective."""
    with channel.waiting():
        # This is the count of a ring all-reduce, which backends use for long tensors.
        channel.bytes_sent += sum(2 * (channel.size - 1) * flat.nbytes // channel.size for flat in flats)
        return [(dist.all_reduce(flat, group=channel.group, async_op=True), None) for flat in flats]


@torch.no_grad()
def gather_owned(channel: Channel, parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy to every rank the tensors that each rank owns; long tensors without a copy.

    Args:
        channel: The connection to the other ranks.
        parts: For each rank the contiguous tensors that it owns, of the same sizes and dtypes on every rank.
    """
    plans = [plan_packets(each, range(len(each)), limit=LONG_TENSOR_BYTES, alone=LONG_TENSOR_BYTES) for each in parts]
    packets = [
        [[parts[rank][index].detach() for index in indices] for indices in plan] for rank, plan in enumerate(plans)
    ]
    # A packet of several tensors is short, so that the memory for one that arrives may be filled in vain.
    own = [channel.reachable(pack(packet)) for packet in packets[channel.rank]]
    others = [rank for rank in range(channel.size) if rank != channel.rank]
    arriving = [(channel.reachable(pack(packet)), rank, packet) for rank in others for packet in packets[rank]]
    for device in {tensor.device for each in parts for tensor in each}:
        channel.connect(device)
    posted = PostedWork()
    sends = [(flat, rank) for rank in others for flat in own]
    channel.post(sends, [(flat, rank) for flat, rank, _ in arriving], posted, OWNED_TAG)
    channel.wait(posted.incoming)
    for flat, _, packet in arriving:
        unpack(flat, packet)
    channel.wait(posted.outgoing)


@torch.no_grad()
def all_reduce(channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors over ranks in place, in the order of the transport; long tensors without a copy."""
    plan = plan_packets(tensors, range(len(tensors)), limit=PACKET_BYTES, alone=LONG_TENSOR_BYTES)
    packets = [[tensors[index] for index in indices] for indices in plan]
    flats = [channel.reachable(pack(packet)) for packet in packets]
    channel.wait(begin_all_reduce(channel, flats))
    for packet, flat in zip(packets, flats, strict=True):
        unpack(flat, packet)
