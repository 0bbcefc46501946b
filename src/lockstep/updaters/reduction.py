"""Add up the places' partial sums, divide once, and check the result, in slices side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch

from lockstep.plan import Piece
from lockstep.precision import sent, settled
from lockstep.tree import PartialSum, Tensors, total

Told = TypeVar("Told")

Finish: TypeAlias = Callable[[list[torch.Tensor]], Told]
"""Divides sums in place, and may tell something of the quotients."""


def gather(partials: Sequence[PartialSum], device: torch.device) -> list[PartialSum]:
    """Bring partial sums of all places to one device; those that are there stay as they are."""
    return [
        PartialSum(
            partial.shard,
            [None if tensor is None else sent(tensor, device) for tensor in partial.tensors],
        )
        for partial in partials
    ]


def roots(partials: Sequence[PartialSum], num_parameters: int) -> Tensors:
    """Give the tensors that `reduce_slice` adds everything to: of each parameter the first there is."""
    found: Tensors = [None] * num_parameters
    for partial in reversed(partials):
        for index, tensor in enumerate(partial.tensors):
            if tensor is not None:
                found[index] = tensor
    return found


def reduce_slice(partials: Sequence[PartialSum], pieces: Sequence[Piece], finish: Finish[Told]) -> Told:
    """Sum one slice of the gradient over all partial sums, in place of the roots, and finish it.

    Args:
        partials: In ascending order of shards, on one device; changed in place.
        pieces: Which elements; slices of the same gradient may be reduced at the same time.
        finish: Called once, with what came out.

    Returns:
        What `finish` told.

    Determinism: sums follow the tree and are elementwise, so neither slices nor threads show in the bits.
    """
    views = [
        PartialSum(partial.shard, [_view(partial.tensors[piece.tensor], piece) for piece in pieces])
        for partial in partials
    ]
    return finish([tensor for tensor in total(views) if tensor is not None])


def reduce_whole(partials: Sequence[PartialSum], finish: Finish[Told]) -> tuple[Tensors, Told]:
    """Do what `reduce_slice` does for all elements, of gradients of any layout.

    Returns:
        What came out, one entry a parameter, and what `finish` told.
    """
    return finished(total(partials), finish)


def finished(sums: Tensors, finish: Finish[Told]) -> tuple[Tensors, Told]:
    """Finish what is summed already; see `reduce_whole`."""
    whole = [None if tensor is None else settled(tensor) for tensor in sums]
    return whole, finish([tensor for tensor in whole if tensor is not None])


def can_be_cut(partials: Sequence[PartialSum]) -> bool:
    """Tell whether all gradients lie in memory without gaps, so that a run of elements is a view."""
    return all(
        tensor is None or (not tensor.is_sparse and tensor.is_contiguous())
        for partial in partials
        for tensor in partial.tensors
    )


def _view(tensor: torch.Tensor | None, piece: Piece) -> torch.Tensor | None:
    if tensor is None or piece.whole:
        return tensor
    return tensor.view(-1)[piece.start : piece.stop]
