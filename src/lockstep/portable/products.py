"""Compute float32 matrix products by oneDNN's linear kernel.

MKL's products are the same on all processors in its mode COMPATIBLE, and slow, because it uses vectors of four numbers.
oneDNN's, restricted to AVX2, block the sum by a constant and by no size of a cache. float64 and small products stay
with MKL, whose calls cost less.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SMALL: Final = 1 << 18
"""The number of multiplications below which MKL takes less time. It is part of the result."""

TRANSPOSED: Final = 2
"""The cost of transposing an element of a product, relative to that of copying an element of a matrix."""

BATCHED: Final = 3
"""The number of dimensions of a batch of matrices."""

_FLOAT32: Final = torch.float32
_STRIDED: Final = torch.strided
_LINEAR: Final = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - oneDNN's kernel has no public name


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply two float32 matrices by oneDNN, and add a bias to each row.

    Shapes: (M, K), (K, N) and (N,) give (M, N).
    """
    # The kernel copies a first matrix that is stored by columns, as in the gradient of a weight. Both are exchanged
    # where that takes longer than to copy the other one and to transpose the product. Each element is added up in the
    # same order either way, except where the other dimension is 1.
    (rows, terms), columns = a.shape, b.shape[1]
    is_by_columns = bias is None and a.stride()[0] == 1 < columns
    if is_by_columns and rows * terms > terms * columns + TRANSPOSED * rows * columns:
        return multiply(b.t(), a.t()).t().contiguous()
    weight = b.t()
    # Rows that overlap, such as those of an expanded gradient, are no matrix for oneDNN.
    if not _is_matrix(a):
        a = a.contiguous()
    if not _is_matrix(weight):
        weight = weight.contiguous()
    product: Tensor = _LINEAR(a, weight, bias, "none", [], "")
    return product


def _is_matrix(tensor: Tensor) -> bool:
    rows, columns = tensor.shape
    down, across = tensor.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether both are dense float32 matrices on CPUs with many multiplications."""
    return (
        a.dtype is _FLOAT32
        and b.dtype is _FLOAT32
        and a.is_cpu
        and a.layout is _STRIDED
        and b.layout is _STRIDED
        and a.numel() * b.shape[-1] >= SMALL
        and not a.is_conj()
    )


def mm(a: Tensor, b: Tensor) -> Tensor | None:
    """Multiply two matrices."""
    return multiply(a, b) if _fits(a, b) and a.shape[1] == b.shape[0] else None


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """Multiply two matrices, and add a bias to each row."""
    is_linear = bias.dim() == 1 and beta == 1 and alpha == 1 and bias.dtype is _FLOAT32
    if is_linear and _fits(a, b) and a.shape[1] == b.shape[0] and bias.shape[0] == b.shape[1]:
        return multiply(a, b, bias.contiguous())
    return None


def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    """Multiply the matrices of two batches."""
    # The threshold is one of a single matrix.
    is_large = a.dtype is _FLOAT32 and a.dim() == b.dim() == BATCHED and a.shape[0] == b.shape[0] > 0
    if is_large and a.shape[2] == b.shape[1] and _fits(a[0], b[0]):
        return torch.stack([multiply(a[index], b[index]) for index in range(a.shape[0])])
    return None
