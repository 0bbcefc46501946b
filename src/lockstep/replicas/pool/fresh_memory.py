"""Fill memory that functions leave unwritten, to see whether a result depends on it."""

from __future__ import annotations

from math import nan
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

ALLOCATIONS: Final = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    }
)
"""The functions that return memory without writing to it."""


class FreshMemory(TorchFunctionMode):
    """Fills the memory that functions leave unwritten.

    It sees calls from Python. A mode of the dispatcher would also see those within kernels, and change results: below
    it, kernels such as that of `affine_grid` call other operators without autocast.

    Args:
        value: The number to fill it with. In integers NaN becomes the largest one.
    """

    def __init__(self, value: float = nan) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and fill what it has allocated."""
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and not made.is_meta:
            # Not shown to modes of the dispatcher, which compare what is called.
            with torch._C._DisableTorchDispatch(), torch.no_grad():  # noqa: SLF001 - no public way
                fill(made, self.value)
        return made


def fill(tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor with a number, and one of integers with 0 or the largest one.

    Args:
        tensor: Changed in place.
        value: The number.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(value)
    elif tensor.dtype == torch.bool:
        tensor.fill_(value != 0)
    elif not tensor.is_quantized:
        tensor.fill_(0 if value == 0 else torch.iinfo(tensor.dtype).max)
