"""Compare the memory layouts of tensors, for kernels that read memory without looking at strides.

Fused optimizers process a weight, its gradient and its optimizer state as if each were one run of numbers in memory.
This is correct only if all of them are dense and have the same strides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, each exactly once, for any order of the dimensions.

    Args:
        tensor: The tensor to check, of any layout.

    >>> weight = torch.zeros(4, 3)
    >>> is_dense(weight.t()), is_dense(weight[:, 0]), is_dense(torch.zeros(1).expand(3))
    (True, False, False)
    """
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    # In ascending order of strides, each stride of a dense tensor is the product of all smaller dimensions. A dimension
    # of size 1 can have any stride.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether a strided tensor has the given strides, ignoring dimensions of size 1.

    Args:
        tensor: The tensor to check.
        strides: The expected strides, one per dimension.

    >>> has_strides(torch.zeros(1, 3), (7, 1)), has_strides(torch.zeros(2, 3), (1, 2))
    (True, False)
    """
    own = tensor.stride()
    if own == strides or tensor.numel() == 0:
        return True
    return all(size == 1 or stride == other for size, stride, other in zip(tensor.shape, own, strides, strict=True))


def gradient_strides(weight: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd chooses for a gradient: those of a dense weight, or else contiguous ones.

    Args:
        weight: The parameter that the gradient belongs to.

    >>> gradient_strides(torch.zeros(4, 3).t()), gradient_strides(torch.zeros(4, 3)[:, ::2])
    ((1, 3), (2, 1))
    """
    return weight.stride() if is_dense(weight) else torch.empty(weight.shape, device="meta").stride()


def laid_out_for(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the strides that autograd chooses for a gradient of the weight, copied if necessary.

    Args:
        weight: A parameter of the same shape. It is not modified.
        tensor: A gradient or an optimizer state. A tensor that is not strided is returned as it is.

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
