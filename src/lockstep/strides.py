"""Compare how tensors lie in memory, for kernels that read it without looking at strides.

Fused optimizers walk over a weight, its gradient and what they remember for it as if each were one run of
numbers. So all of them must be dense, and have the same strides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill one block of memory, each once, in whatever order of dimensions.

    >>> weight = torch.zeros(4, 3)
    >>> is_dense(weight.t()), is_dense(weight[:, 0]), is_dense(torch.zeros(1).expand(3))
    (True, False, False)
    """
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Tell whether a strided tensor lies in memory by these strides; those of dimensions of 1 say nothing.

    >>> has_strides(torch.zeros(1, 3), (7, 1)), has_strides(torch.zeros(2, 3), (1, 2))
    (True, False)
    """
    own = tensor.stride()
    if own == strides or tensor.numel() == 0:
        return True
    return all(size == 1 or stride == other for size, stride, other in zip(tensor.shape, own, strides, strict=True))


def gradient_strides(weight: Tensor) -> tuple[int, ...]:
    """Give the strides that autograd gives a gradient: a dense weight's own, else those of row after row.

    >>> gradient_strides(torch.zeros(4, 3).t()), gradient_strides(torch.zeros(4, 3)[:, ::2])
    ((1, 3), (2, 1))
    """
    if is_dense(weight):
        return weight.stride()
    strides = [1]
    for size in reversed(weight.shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def laid_out_for(weight: Tensor, tensor: Tensor) -> Tensor:
    """Give a tensor the strides that autograd gives a gradient of the weight, by a copy where it has others.

    Args:
        weight: Of the same shape; left untouched.
        tensor: A gradient, or what an optimizer remembers; sparse ones stay as they are.

    >>> weight = torch.zeros(4, 3).t()
    >>> laid_out_for(weight, torch.ones(3, 4)).stride()
    (1, 3)
    """
    if tensor.layout is not torch.strided:
        return tensor
    strides = gradient_strides(weight)
    if has_strides(tensor, strides):
        return tensor
    laid = torch.empty_strided(weight.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor.detach())
