"""Sums of sparse tensors over ranks: every rank gets all parts, and adds them up as one process would.

How a sparse sum is laid out depends on which elements each part has, so no part of it can be planned ahead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.communicators.communicator import Contribution
from lockstep.communicators.transport import Channel, broadcast, exchange
from lockstep.tree import PartialSum, Tensors, divide, total


def split_sparse(contributions: Sequence[Contribution]) -> tuple[list[Contribution], list[int]]:
    """Take out of contributions the tensors that some rank has as a sparse one.

    Returns:
        What is left, and the indices of those taken out.
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
    divisor: float,
) -> Tensors:
    """Add up some of the tensors of all ranks, of which some are sparse.

    Args:
        channel: Joins the ranks.
        partials: This rank's.
        contributions: What all ranks bring.
        like: Tensors of the shapes, dtypes and devices of the result.
        indices: Which tensors are added up.
        divisor: Their sums are divided by it.

    Returns:
        Their sums, in the order of `indices`.
    """
    forms = [[_form(partial.tensors[index]) for index in indices] for partial in partials]
    said = exchange(channel, json.dumps(forms).encode())
    sums: list[PartialSum] = []
    for rank, message in enumerate(said):
        shards = contributions[rank].shards
        for node, (shard, row) in enumerate(zip(shards, json.loads(message), strict=True)):
            sums.append(PartialSum(shard, [None] * len(indices)))
            for place, (index, form) in enumerate(zip(indices, row, strict=True)):
                own = partials[node].tensors[index] if rank == channel.rank else None
                sums[-1].tensors[place] = _sent(channel, own, form, like[index], rank)
    return divide(total(sums), divisor)


def _form(tensor: torch.Tensor | None) -> list[Any]:
    """Say how a tensor is laid out, as much as a receiver must know to make room for it."""
    if tensor is None:
        return ["absent"]
    if not tensor.is_sparse:
        return ["dense"]
    return ["sparse", tensor.is_coalesced(), *(part.shape for part in _parts(tensor))]


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the indices and values of a sparse tensor as they lie, an element maybe in several parts."""
    return tensor._indices(), tensor._values()  # noqa: SLF001 - the public names are for coalesced ones


def _sent(
    channel: Channel, tensor: torch.Tensor | None, form: Sequence[Any], like: torch.Tensor, source: int
) -> torch.Tensor | None:
    """Bring a tensor from one rank to all."""
    kind, *layout = form
    if kind == "absent":
        return None
    if kind == "dense":
        dense = torch.empty_like(like) if tensor is None else tensor
        broadcast(channel, [dense], source)
        return dense
    coalesced, shape_of_indices, shape_of_values = layout
    if tensor is None:
        indices = torch.empty(shape_of_indices, dtype=torch.int64, device=like.device)
        values = torch.empty(shape_of_values, dtype=like.dtype, device=like.device)
    else:
        indices, values = _parts(tensor)
    broadcast(channel, [indices, values], source)
    if tensor is not None:
        return tensor
    return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=coalesced, check_invariants=False)
