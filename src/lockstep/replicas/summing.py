"""Add up the gradients of devices in the tree's order, in slices side by side where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep import plan
from lockstep.plan import Piece
from lockstep.replicas.replica_set import ReplicaSet
from lockstep.tree import PartialSum, Tensors, merge_order, total

SIDE_BY_SIDE: Final = 400_000
"""Elements. Fewer have been added up by one thread before a second has begun."""


def add_up(partials: Sequence[PartialSum], replicas: ReplicaSet, *, keep: bool) -> Tensors:
    """Sum partial sums of all devices.

    Args:
        partials: In ascending order of shards, all on one device.
        replicas: Their threads add, each a slice, where the tensors are large.
        keep: Leave the partial sums as they are; else they are added to in place.

    Returns:
        The sum, one entry a parameter; None where no shard had one, a partial sum where it is alone.

    Determinism: as `tree.total`; elementwise, so slices do not show in the bits.
    """
    if len(partials) == 1:
        return partials[0].tensors
    present = [_present(partials, index) for index in range(len(partials[0].tensors))]
    if not _worth_slicing(present, replicas):
        return _total_apart(partials) if keep else total(partials)
    sums = [_room(parts, keep=keep) for parts in present]
    sizes = [tensor.numel() if len(parts) > 1 else 0 for parts in present for tensor in _first(parts)]
    where = [index for index, parts in enumerate(present) if parts]
    slices = plan.slices(sizes, len(replicas.devices))

    def add(place: int) -> None:
        for piece in slices[place]:
            index = where[piece.tensor]
            into = sums[index]
            if into is not None:
                _add_piece(present[index], piece, into, keep=keep)

    replicas.run(add)
    return sums


def _present(partials: Sequence[PartialSum], index: int) -> list[tuple[int, torch.Tensor]]:
    """List the partial sums of one parameter that there are, each with its first shard."""
    found = ((partial.shard, partial.tensors[index]) for partial in partials)
    return [(shard, tensor) for shard, tensor in found if tensor is not None]


def _first(parts: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for _, tensor in parts[:1]]


def _room(parts: Sequence[tuple[int, torch.Tensor]], *, keep: bool) -> torch.Tensor | None:
    """Give the tensor that the sum of one parameter is written to."""
    if not parts:
        return None
    first = parts[0][1]
    return torch.empty_like(first) if keep and len(parts) > 1 else first


def _worth_slicing(present: Sequence[Sequence[tuple[int, torch.Tensor]]], replicas: ReplicaSet) -> bool:
    """Tell whether threads are there, have enough to do, and can be given runs of elements."""
    if len(replicas.devices) == 1 or any(device.type != "cpu" for device in replicas.devices):
        return False
    tensors = [tensor for parts in present for _, tensor in parts]
    if sum(tensor.numel() for tensor in tensors) < 2 * SIDE_BY_SIDE:
        return False
    return all(not tensor.is_sparse and tensor.is_contiguous() for tensor in tensors)


def _add_piece(
    parts: Sequence[tuple[int, torch.Tensor]], piece: Piece, into: torch.Tensor, *, keep: bool
) -> None:
    """Sum one run of elements of one parameter."""
    sums = [_view(tensor, piece) for _, tensor in parts]
    ours = set() if keep else set(range(len(parts)))
    *rest, (first, last) = merge_order([shard for shard, _ in parts])
    for left, right in rest:
        sums[left] = torch.add(sums[left], sums[right], out=sums[left] if left in ours else None)
        ours.add(left)
    torch.add(sums[first], sums[last], out=_view(into, piece))


def _view(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor if piece.whole else tensor.view(-1)[piece.start : piece.stop]


def _total_apart(partials: Sequence[PartialSum]) -> Tensors:
    """Sum partial sums as `tree.total` does, and leave them as they are."""
    sums = [partial.tensors for partial in partials]
    for into, other in merge_order([partial.shard for partial in partials]):
        sums[into] = _sum_apart(sums[into], sums[other])
    return sums[0]


def _sum_apart(left: Tensors, right: Tensors) -> Tensors:
    """Add tensor by tensor into new ones; a lone one stays."""
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(left, right, strict=True)
    ]
