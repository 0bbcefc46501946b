"""Divide gradients by a loss scale and find out whether they are finite, at the price of reading them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

FEW: Final = 16
"""Numbers on a CPU that are read one by one faster than they are added up first."""

_LARGEST_INVERTIBLE = 2.0**126
"""The inverse is a normal float32, in which torch's kernel takes it."""

_MANTISSA_OF_POWERS = 0.5
"""What `math.frexp` says of powers of two."""


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


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """List the gradients there are, after adding up in place what sparse ones hold twice."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad)
    return found


def unscale_(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    """Divide gradients by a factor and tell, without waiting, whether all that came out is finite.

    What is checked is the quotient: a factor below 1 can carry a finite gradient past the largest number
    of its format. Where neither that nor rounding can be (a power of two from 1 on, on a CPU, where
    looking at it is free) both are done in one pass over the memory.

    Args:
        gradients: Changed in place; sparse ones must be coalesced.
        factor: Positive, 0-d, float64, on any device.

    Returns:
        1 if an element is not finite, else 0: 0-d, float32, on the factor's device.

    Determinism: elementwise division, rounded once.

    >>> gradients = [torch.tensor([8.0, 16.0])]
    >>> unscale_(gradients, torch.tensor(8.0, dtype=torch.float64)), gradients
    (tensor(0.), [tensor([1., 2.])])
    """
    known = factor.item() if factor.device.type == "cpu" else math.nan
    if _is_harmless(known):
        return _check_and_multiply_(gradients, 1.0 / known, factor.device)
    for (device, _), values in _by_kind(gradients).items():
        torch._foreach_div_(values, factor.to(device, non_blocking=True))
    return _check_and_multiply_(gradients, 1.0, factor.device)


def nonfinite_flag(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tell, without waiting, whether gradients are finite, and leave them as they are.

    Returns:
        1 if an element is not finite, else 0: 0-d, float32, on the device.

    >>> nonfinite_flag([torch.ones(2), torch.tensor([float("inf")])], torch.device("cpu"))
    tensor(1.)
    """
    return _check_and_multiply_(gradients, 1.0, device)


def _check_and_multiply_(
    gradients: Sequence[torch.Tensor], inverse: float, device: torch.device
) -> torch.Tensor:
    """Run torch's kernel for both, kind by kind, and gather the flags."""
    flags: dict[torch.device, torch.Tensor] = {device: torch.zeros((), device=device)}
    for (there, _), values in _by_kind(gradients).items():
        if there not in flags:
            flags[there] = torch.zeros((), device=there)
        torch._amp_foreach_non_finite_check_and_unscale_(
            values, flags[there], torch.full((), inverse, device=there)
        )
    found = flags.pop(device)
    for flag in flags.values():
        found = torch.maximum(found, flag.to(device, non_blocking=True))
    return found


def _by_kind(
    gradients: Sequence[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Sort the values of gradients by device and dtype, as torch's kernels want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - values() is a copy where gradients are off
        kinds.setdefault((values.device, values.dtype), []).append(values)
    return kinds


def _is_harmless(factor: float) -> bool:
    """Tell whether dividing by it can neither round a normal number nor overflow."""
    return 1.0 <= factor <= _LARGEST_INVERTIBLE and math.frexp(factor)[0] == _MANTISSA_OF_POWERS
