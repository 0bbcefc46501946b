"""Euclidean norms whose order of summation depends on the shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

# In elements. From 32768 on, torch's reductions on a CPU share one sum among the threads they find.
PIECE = 16384


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, without waiting for the device.

    Every tensor is cut into pieces so small that each is summed by one thread, and the norms of
    the pieces are joined the same way.

    Args:
        tensors: Left untouched.

    Returns:
        A 0-d tensor each, on the tensor's device; float64 for tensors of that precision, else float32.

    Determinism: the order of summation is a function of the shape. The number of threads, the layout
    in memory and the other tensors do not matter.

    >>> norms([torch.tensor([3.0, 4.0]), torch.tensor([])])
    [tensor(5.), tensor(0.)]
    """
    pieces = [torch.split(tensor.detach().reshape(-1), PIECE) for tensor in tensors]
    flat = _piece_norms([piece for parts in pieces for piece in parts])
    return [_join(list(islice(flat, len(parts)))) for parts in pieces]


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors taken as one vector, without waiting for the device.

    Args:
        tensors: At least one; left untouched. They may be on several devices.

    Returns:
        A 0-d tensor on the device of the first.

    Determinism: as `norms`; the order of summation is a function of the shapes and their order.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    return _join(norms(tensors))


def _piece_norms(pieces: list[Tensor]) -> Iterator[Tensor]:
    """Take the norms of many small tensors, in half precision with float32 inside."""
    kinds = {piece.dtype for piece in pieces}
    if kinds <= {torch.float32, torch.float64, torch.complex64, torch.complex128}:
        return iter(torch._foreach_norm(pieces))
    return iter([torch.linalg.vector_norm(piece.to(_precision(piece))) for piece in pieces])


def _precision(tensor: Tensor) -> torch.dtype:
    """Say in which precision a tensor's norm is taken."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _join(parts: list[Tensor]) -> Tensor:
    """Combine norms of parts into the norm of the whole."""
    if len(parts) == 1:
        return parts[0]
    row = torch.stack([part.to(parts[0].device) for part in parts])
    if len(row) > PIECE:
        return global_norm(torch.split(row, PIECE))
    norm: Tensor = torch.linalg.vector_norm(row)
    return norm
