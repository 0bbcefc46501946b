"""Find out whether gradients are finite, at the price of reading them once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

FEW: Final = 16
"""Numbers on a CPU that are read one by one faster than they are added up first."""


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give the 2-norm of each tensor, finite only if all its elements are.

    A norm that overflows although the elements are finite is settled by `first_nonfinite`.
    """
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    return list(torch._foreach_norm(dense)) if dense else []


def norms_are_finite(values: Sequence[torch.Tensor]) -> bool:
    """Tell whether all of these norms are finite; waits for their device.

    Norms are not negative, so their sum is finite only if each of them is.
    """
    if len(values) <= FEW and all(value.device.type == "cpu" for value in values):
        return all(math.isfinite(value.item()) for value in values)
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in values:
        kinds.setdefault((value.device, value.dtype), []).append(value)
    return all(math.isfinite(torch.stack(group).sum().item()) for group in kinds.values())


def first_nonfinite(tensors: Mapping[str, torch.Tensor | None]) -> str | None:
    """Name the first tensor that holds an infinity or a NaN, looking at every element.

    >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
    'b'
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            if not bool(values.isfinite().all()):
                return name
    return None
