"""Dispatch modes that see every operator that a shard or an optimizer calls."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""The operators that return memory without writing to it."""


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's base class has no types
    """Fills the memory that operators leave unwritten, and chooses no other kernel by it.

    Args:
        value: The number to fill it with. In integers NaN becomes the largest one.
    """

    def __init__(self, value: float = float("nan")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and fill what it has allocated."""
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS and isinstance(made, torch.Tensor) and not made.is_meta:
            fill(made, self._value)
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
