"""Euclidean norms whose order of summation depends only on the shapes of the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

# In elements. From 32768 elements on, torch splits a reduction on a CPU over its threads, so that the order of
# the additions would depend on their number.
CHUNK_NUMEL = 16384


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, without synchronizing with the device.

    Every tensor is split into chunks that are small enough to be summed by one thread each, and the norms of
    the chunks are combined in the same way.

    Args:
        tensors: The tensors whose norms are computed; left untouched.

    Returns:
        A 0-d tensor per input, on the input's device; float64 for inputs of that precision, otherwise float32.

    Raises:
        TypeError: If a tensor is sparse.

    Determinism: the order of summation is a function of the shape. It does not depend on the number of
    threads, the memory layout or the other tensors.

    >>> norms([torch.tensor([3.0, 4.0]), torch.tensor([])])
    [tensor(5.), tensor(0.)]
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"A norm, as for `clip_grad_norm`, must be that of dense tensors, got one of {tensor.layout} of shape "
                f"{[*tensor.shape]}. Pass sparse=False to the embedding, or give its weight to an optimizer whose "
                "gradients are not clipped."
            )
    # Flattened in logical order first, or the order of the additions would follow the layout in memory.
    chunks = [torch.split(tensor.detach().reshape(-1), CHUNK_NUMEL) for tensor in tensors]
    chunk_norms = _chunk_norms([chunk for parts in chunks for chunk in parts])
    return [_combine(list(islice(chunk_norms, len(parts)))) for parts in chunks]


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors as if they were concatenated, without synchronizing with the device.

    Args:
        tensors: At least one tensor; they may be on several devices, and are left untouched.

    Returns:
        A 0-d tensor on the device of the first tensor.

    Determinism: the order of summation is a function of the shapes and of their order, see `norms`.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    return _combine(norms(tensors))


def _chunk_norms(chunks: list[Tensor]) -> Iterator[Tensor]:
    """Compute the norms of many small tensors; those in half precision are computed in float32."""
    dtypes = {chunk.dtype for chunk in chunks}
    if dtypes <= {torch.float32, torch.float64, torch.complex64, torch.complex128}:
        return iter(torch._foreach_norm(chunks))
    return map(torch.linalg.vector_norm, (each.to(torch.promote_types(each.dtype, torch.float32)) for each in chunks))


def _combine(parts: list[Tensor]) -> Tensor:
    """Combine the norms of parts into the norm of the whole."""
    if len(parts) == 1:
        return parts[0]
    row = torch.stack([part.to(parts[0].device) for part in parts])
    # So many parts that their own sum would be split over threads again.
    if len(row) > CHUNK_NUMEL:
        return global_norm(torch.split(row, CHUNK_NUMEL))
    norm: Tensor = torch.linalg.vector_norm(row)
    return norm
