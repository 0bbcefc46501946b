"""Find out whether gradients are finite, at the price of reading them once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch


@torch.no_grad()
def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give the 2-norm of each tensor, finite only if all its elements are.

    A norm that overflows although the elements are finite is settled by `first_nonfinite`.
    """
    dense = [tensor for tensor in tensors if not tensor.is_sparse]
    sparse = [tensor.coalesce().values() for tensor in tensors if tensor.is_sparse]
    return list(torch._foreach_norm(dense + sparse)) if dense or sparse else []


def norms_are_finite(values: Iterable[torch.Tensor]) -> bool:
    """Tell whether all of these norms are finite; waits for their device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(value.to(torch.float64))
    return all(bool(torch.stack(group).isfinite().all()) for group in by_device.values())


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
