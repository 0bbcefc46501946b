"""Divide gradients by a factor and find out whether they are finite, without waiting for their device.

This is the one place of the project that does either: for updaters, for `LossScaler`, for optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")

_LARGEST_INVERTIBLE = 2.0**126
"""The inverse is a normal float32, in which torch's kernel takes it."""

_MANTISSA_OF_POWERS = 0.5
"""What `math.frexp` says of powers of two."""

_WIDE: Final = frozenset({torch.float32, torch.float64})
"""Real formats in which the sum of ordinary gradients is far from the largest number."""

Kinds: TypeAlias = dict[tuple[torch.device, torch.dtype], list[Tensor]]
"""Elements of gradients by device and dtype, as torch's kernels want them."""


def unscale_(gradients: Sequence[Tensor], factor: float | Tensor) -> Tensor:
    """Divide gradients by a factor and tell, without waiting, whether all that came out is finite.

    What is checked is the quotient: a factor below 1 can carry a finite gradient past the largest number
    of its format. Where neither that nor rounding can be (a power of two from 1 on, known on the host) both
    are done in one pass over the memory.

    Args:
        gradients: Changed in place; `settled`.
        factor: Positive; a number, or 0-d, float64, on any device.

    Returns:
        1 if an element is not finite, else 0: 0-d, float32, on the factor's device if that is a tensor.

    Determinism: elementwise division by the factor in the gradient's own format (float32 for halves), rounded
    once.

    >>> gradients = [torch.tensor([8.0, 16.0])]
    >>> unscale_(gradients, 8.0), gradients
    (tensor(0.), [tensor([1., 2.])])
    """
    if isinstance(factor, Tensor):
        divide_(gradients, factor)
        return nonfinite_flag(gradients, factor.device)
    device = gradients[0].device if gradients else CPU
    if _is_harmless(factor) and not any(map(_is_in_parts, gradients)):
        return _check_and_multiply_(_by_kind(map(_elements, gradients)), 1.0 / factor, device)
    divide_(gradients, factor)
    return nonfinite_flag(gradients, device)


def unscale_and_look_(gradients: Sequence[Tensor], factor: float | Tensor) -> bool:
    """Do what `unscale_` does and wait for the answer, which on a CPU takes no pass that writes.

    Args:
        gradients: As `unscale_`.
        factor: As `unscale_`.

    Returns:
        Whether all that came out is finite.

    Determinism: the quotients of `unscale_`.

    >>> gradients = [torch.tensor([9.0, 18.0])]
    >>> unscale_and_look_(gradients, 3.0), gradients
    (True, [tensor([3., 6.])])
    """
    if isinstance(factor, Tensor) or (factor != 1.0 and _is_harmless(factor)):
        return not unscale_(gradients, factor)
    divide_(gradients, factor)
    return _add_up(gradients) or not nonfinite_flag(gradients, CPU)


def divide_(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Do the first half of `unscale_`: divide, and tell nothing."""
    if isinstance(factor, Tensor):
        for (device, dtype), values in _by_kind(map(_elements, gradients)).items():
            _divide_on_device_(values, sent(factor, device), dtype)
    elif factor != 1.0:
        for values in _by_kind(map(_elements, gradients)).values():
            torch._foreach_div_(values, factor)


def _divide_on_device_(values: list[Tensor], factor: Tensor, dtype: torch.dtype) -> None:
    """Divide by a tensor in its own format, without which CUDA's kernel goes through values one by one.

    In half precision a GPU would round the factor to the format, past its largest number to infinity.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        torch._foreach_div_(values, factor.to(dtype))
        return
    wide = [value.float() for value in values]
    torch._foreach_div_(wide, factor.float())
    torch._foreach_copy_(values, wide)


def nonfinite_flag(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tell, without waiting, whether gradients are finite, and leave them as they are.

    Returns:
        1 if an element is not finite, else 0: 0-d, float32, on the device.

    >>> nonfinite_flag([torch.ones(2), torch.tensor([float("inf")])], torch.device("cpu"))
    tensor(1.)
    """
    return _check_and_multiply_(_by_kind(map(_sums, gradients)), 1.0, device)


def nonfinite_flags(gradients: Sequence[Tensor]) -> Tensor:
    """Tell of each gradient, without waiting, whether it is finite.

    Args:
        gradients: At least one; `settled`, on one device; left as they are.

    Returns:
        1 where an element is not finite, else 0: one float32 for each gradient, on their device.

    >>> nonfinite_flags([torch.ones(2), torch.tensor([float("inf")])])
    tensor([0., 1.])
    """
    parts = [_sums(gradient) for gradient in gradients]
    if parts[0].device.type == "cpu":
        # Neither the default dtype, for the kernel takes no other, nor the default device.
        flags = torch.zeros(len(parts), dtype=torch.float32, device=CPU)
        one = torch.ones((), dtype=torch.float32, device=CPU)
        for part, flag in zip(parts, flags.unbind(), strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_([part], flag, one)
        return flags
    # One pass of one kernel over all; a CPU takes a maximum sixteen times slower than it checks.
    norms = list(torch._foreach_norm(parts, math.inf))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(norms).isfinite().logical_not().float()


def first_nonfinite(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Name the first tensor that holds an infinity or a NaN; waits for their device, which is one.

    >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
    'b'
    """
    present = {name: settled(tensor) for name, tensor in tensors.items() if tensor is not None}
    return first_flagged(list(present), nonfinite_flags(list(present.values()))) if present else None


def first_flagged(names: Sequence[str], flags: Tensor) -> str | None:
    """Give the first name whose flag, as `nonfinite_flags` gave it, is up; waits for the device."""
    return next((name for name, flag in zip(names, flags.tolist(), strict=True) if flag), None)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """List the gradients there are, `settled` where they are."""
    found: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = settled(parameter.grad)
            if gradient is not parameter.grad:
                parameter.grad = gradient
            found.append(gradient)
    return found


def settled(gradient: Tensor) -> Tensor:
    """Conjugate or negate the elements of a tensor that is only marked so; mostly there is nothing to do."""
    marked = gradient.is_conj() or gradient.is_neg()
    return gradient.resolve_conj().resolve_neg() if marked else gradient


def sent(number: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device; waits only for one on its way to the CPU, where it is read at once."""
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def _check_and_multiply_(kinds: Kinds, inverse: float, device: torch.device) -> Tensor:
    """Run torch's kernel for both, kind by kind, and gather the flags."""
    flags = []
    for (there, _), values in kinds.items():
        # Not the default dtype: the kernel takes no other.
        flag = torch.zeros((), dtype=torch.float32, device=there)
        factor = torch.full((), inverse, dtype=torch.float32, device=there)
        torch._amp_foreach_non_finite_check_and_unscale_(values, flag, factor)
        flags.append(sent(flag, device))
    if len(flags) == 1:
        return flags[0]
    return torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=device)


def _by_kind(parts: Iterable[Tensor]) -> Kinds:
    """Sort the elements of gradients."""
    kinds: Kinds = {}
    for part in parts:
        kinds.setdefault((part.device, part.dtype), []).append(part)
    return kinds


def _elements(gradient: Tensor) -> Tensor:
    """View what a gradient has in memory as dense real numbers."""
    # values() would be a copy where gradients are off.
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - see above
    return torch.view_as_real(values) if values.is_complex() else values


def _sums(gradient: Tensor) -> Tensor:
    """Give the dense real numbers that a gradient means; a sparse one may hold an element in parts."""
    return _elements(gradient.coalesce() if gradient.is_sparse else gradient)


def _add_up(gradients: Sequence[Tensor]) -> bool:
    """Tell whether all have finite sums, so that each element is finite; where one has none, all may be.

    No infinity and no NaN is lost in a sum. Only dense gradients on a CPU are added up.
    """
    for gradient in gradients:
        if not gradient.is_cpu or gradient.layout is not torch.strided or gradient.dtype not in _WIDE:
            return False
        if not math.isfinite(gradient.sum().item()):
            return False
    return True


def _is_in_parts(gradient: Tensor) -> bool:
    return gradient.is_sparse and not gradient.is_coalesced()


def _is_harmless(factor: float) -> bool:
    """Tell whether dividing by it can neither round a normal number nor overflow."""
    return 1.0 <= factor <= _LARGEST_INVERTIBLE and math.frexp(factor)[0] == _MANTISSA_OF_POWERS
