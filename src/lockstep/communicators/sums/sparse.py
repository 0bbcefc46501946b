"""Sums of sparse tensors over ranks: every rank receives all terms, and sums them as one process would.

The layout of a sparse sum depends on which elements each term has, so it cannot be planned and cut in advance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.communicators.communicator import Contribution, SumAudit
from lockstep.communicators.sums.audit import SeenSlice, compare
from lockstep.communicators.transport.channel import Channel
from lockstep.communicators.transport.messages import exchange
from lockstep.communicators.transport.packing import broadcast
from lockstep.digest import seal
from lockstep.tree import PartialSum, Tensors, total


def split_sparse(contributions: Sequence[Contribution]) -> tuple[list[Contribution], list[int]]:
    """Split off the tensors that are sparse on at least one rank.

    Args:
        contributions: The contributions of all ranks.

    Returns:
        The contributions without these tensors, and the indices of these tensors.
    """
    mask = 0
    for contribution in contributions:
        mask |= contribution.sparse
    left = [Contribution(each.shards, tuple(present & ~mask for present in each.present)) for each in contributions]
    return left, [index for index in range(mask.bit_length()) if mask >> index & 1]


@torch.no_grad()
def sum_sparse(
    channel: Channel,
    partials: Sequence[PartialSum],
    contributions: Sequence[Contribution],
    like: Sequence[torch.Tensor],
    indices: Sequence[int],
    *,
    audit: SumAudit | None,
) -> Tensors:
    """Sum tensors of which some may be sparse over all ranks.

    Args:
        channel: The connection to the other ranks.
        partials: The partial sums of this rank.
        contributions: The contributions of all ranks.
        like: Tensors that have the shapes, dtypes and devices of the result.
        indices: The indices of the tensors to sum.
        audit: Receives what is wrong after a second computation; None to add once.

    Returns:
        The sums, in the order of `indices`.
    """
    own = [PartialSum(each.shard, [each.tensors[index] for index in indices]) for each in partials]
    changed = audit is not None and audit.has_changed(own)
    # Receivers must know the sizes of a sparse tensor before they can allocate memory for it.
    layouts = [list(map(_layout, partial.tensors)) for partial in own]
    messages = exchange(channel, json.dumps(layouts).encode())
    terms: list[PartialSum] = []
    ranks: list[int] = []
    # All ranks go through the nodes and tensors in the same order, because each broadcast is a collective.
    for rank, message in enumerate(messages):
        shards = contributions[rank].shards
        for node, (shard, row) in enumerate(zip(shards, json.loads(message), strict=True)):
            ranks.append(rank)
            terms.append(PartialSum(shard, [None] * len(indices)))
            for position, (index, layout) in enumerate(zip(indices, row, strict=True)):
                tensor = own[node].tensors[position] if rank == channel.rank else None
                terms[-1].tensors[position] = _broadcast_tensor(channel, tensor, layout, like[index], rank)
    if audit is None:
        return total(terms)
    nodes = [[node for node, each in enumerate(terms) if each.tensors[at] is not None] for at in range(len(indices))]
    seals = [[seal(terms[node].tensors[at]) for node in each] for at, each in enumerate(nodes)]
    copies = [PartialSum(each.shard, [None if one is None else one.clone() for one in each.tensors]) for each in terms]
    again, sums = total(copies), total(terms)
    sent = [
        [one if ranks[node] == channel.rank else None for node, one in zip(*each, strict=True)]
        for each in zip(nodes, seals, strict=True)
    ]
    seen = [SeenSlice(*each) for each in zip(sent, map(seal, sums), seals, map(seal, again), strict=True)]
    # Every rank has added all terms, so that any of them may count as the owner.
    compare(audit, channel, changed, [([ranks[node] for node in each], 0) for each in nodes], seen)
    return sums


def _layout(tensor: torch.Tensor | None) -> list[Any]:
    """Return what a receiver must know of a tensor to allocate memory for it."""
    if tensor is None:
        return ["absent"]
    if not tensor.is_sparse:
        return ["dense"]
    return ["sparse", tensor.is_coalesced(), *(part.shape for part in _indices_and_values(tensor))]


def _indices_and_values(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a sparse tensor as they are stored."""
    # Coalescing here would add duplicate entries earlier than one process does, with other bits.
    return tensor._indices(), tensor._values()  # noqa: SLF001 - the public names require coalesced tensors


def _broadcast_tensor(
    channel: Channel, tensor: torch.Tensor | None, layout: Sequence[Any], like: torch.Tensor, source: int
) -> torch.Tensor | None:
    """Return the tensor of one rank on all ranks."""
    kind, *sizes = layout
    if kind == "absent":
        return None
    if kind == "dense":
        dense = torch.empty_like(like) if tensor is None else tensor
        broadcast(channel, [dense], source)
        return dense
    coalesced, shape_of_indices, shape_of_values = sizes
    if tensor is None:
        indices = torch.empty(shape_of_indices, dtype=torch.int64, device=like.device)
        values = torch.empty(shape_of_values, dtype=like.dtype, device=like.device)
    else:
        indices, values = _indices_and_values(tensor)
    broadcast(channel, [indices, values], source)
    if tensor is not None:
        return tensor
    # The tensor must be marked as coalesced only if the original is: sums of coalesced tensors use another kernel.
    return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=coalesced, check_invariants=False)
