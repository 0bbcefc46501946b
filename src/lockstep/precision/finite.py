"""Divide gradients by a factor and check that they are finite, without waiting for their device.

Updaters, `LossScaler` and optimizers all use these functions, so that there is a single implementation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from lockstep.state import temporarily

CPU: Final = torch.device("cpu")

_LARGEST_INVERTIBLE = 2.0**126
"""The largest power of two whose inverse is a normal float32, the format in which torch's kernel takes it."""

_MANTISSA_OF_POWERS = 0.5
"""The mantissa that `math.frexp` returns for powers of two."""

_SUMMABLE: Final = frozenset({torch.float32, torch.float64})
"""Real dtypes in which the sum of ordinary gradients is far from the largest number."""

_NOT_CHECKED_BY_CUDA: Final = frozenset({torch.bfloat16, torch.float64})
"""Dtypes of which CUDA's kernel takes the first not at all, and large numbers of the second for infinities."""

TensorGroups: TypeAlias = dict[tuple[torch.device, torch.dtype], list[Tensor]]
"""Elements of gradients by device and dtype, as torch's foreach kernels need them."""


def unscale_(gradients: Sequence[Tensor], factor: float | Tensor) -> Tensor:
    """Divide gradients by a factor, and check without waiting whether the results are finite.

    The quotients are checked, because a factor below 1 can turn a finite gradient into an infinite one. If the
    division can neither overflow nor round (the factor is a power of two of at least 1, and a number), both are
    done in one pass over the memory.

    Args:
        gradients: The gradients, as `resolve_conj_neg` returns them. Changed in place.
        factor: The factor, which must be positive: a number, or a 0-d float64 tensor on any device.

    Returns:
        A flag that is 1 if an element is not finite, else 0: 0-d, float32, on the device of the factor if that is
        a tensor.

    Determinism: elementwise division by the factor in the format of the gradient (float32 for half precision),
    rounded once.

    >>> gradients = [torch.tensor([8.0, 16.0])]
    >>> unscale_(gradients, 8.0), gradients
    (tensor(0.), [tensor([1., 2.])])
    """
    if isinstance(factor, Tensor):
        divide_(gradients, factor)
        return nonfinite_flag(gradients, factor.device)
    device = gradients[0].device if gradients else CPU
    # The parts of an uncoalesced element may be finite while their sum is not, so those are checked separately.
    if _divides_exactly(factor) and not any(each.is_sparse and not each.is_coalesced() for each in gradients):
        return _check_and_multiply_(_group(map(_elements, gradients)), 1.0 / factor, device)
    divide_(gradients, factor)
    return nonfinite_flag(gradients, device)


def unscale_and_check_(gradients: Sequence[Tensor], factor: float | Tensor) -> bool:
    """Divide gradients as `unscale_` does, and wait for the result of the check.

    On a CPU the check needs no pass that writes memory.

    Args:
        gradients: The gradients, as for `unscale_`. Changed in place.
        factor: The factor, as for `unscale_`.

    Returns:
        Whether all results are finite.

    Determinism: the quotients are those of `unscale_`.

    >>> gradients = [torch.tensor([9.0, 18.0])]
    >>> unscale_and_check_(gradients, 3.0), gradients
    (True, [tensor([3., 6.])])
    """
    if isinstance(factor, Tensor) or (factor != 1.0 and _divides_exactly(factor)):
        return not unscale_(gradients, factor)
    divide_(gradients, factor)
    # The sums are only a fast path. If one is not finite, each element is checked.
    return _all_sums_finite(gradients) or not nonfinite_flag(gradients, CPU)


def divide_(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Divide gradients as `unscale_` does, without a check.

    Args:
        gradients: The gradients, as for `unscale_`. Changed in place.
        factor: The factor, as for `unscale_`.
    """
    if isinstance(factor, Tensor):
        for (device, dtype), values in _group(map(_elements, gradients)).items():
            _divide_on_device_(values, to_device(factor, device), dtype)
    elif factor != 1.0:
        for (device, dtype), values in _group(map(_elements, gradients)).items():
            if device.type == "cpu" or _divides_exactly(factor):
                torch._foreach_div_(values, factor)
            else:
                # By a tensor: CUDA multiplies by the inverse of a number, which rounds twice.
                _divide_on_device_(values, torch.full((), factor, dtype=torch.float64, device=device), dtype)


def _divide_on_device_(values: list[Tensor], factor: Tensor, dtype: torch.dtype) -> None:
    """Divide by a factor that is a tensor."""
    if dtype.itemsize >= torch.float32.itemsize:
        # The factor needs the dtype of the values: with another one, CUDA's kernel would run once per tensor.
        torch._foreach_div_(values, factor.to(dtype))
        return
    # The division goes through float32, because a GPU would round the factor to half precision, in which a large one is
    # infinite.
    wide = [value.float() for value in values]
    torch._foreach_div_(wide, factor.float())
    torch._foreach_copy_(values, wide)


def nonfinite_flag(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Check without waiting whether gradients are finite.

    Args:
        gradients: The gradients, as `resolve_conj_neg` returns them. They are not changed.
        device: The device of the result.

    Returns:
        A flag that is 1 if an element is not finite, else 0: 0-d, float32, on `device`.

    >>> nonfinite_flag([torch.ones(2), torch.tensor([float("inf")])], torch.device("cpu"))
    tensor(1.)
    """
    return _check_and_multiply_(_group(map(_coalesced_elements, gradients)), 1.0, device)


def nonfinite_flags(gradients: Sequence[Tensor]) -> Tensor:
    """Check without waiting which gradients are finite.

    Args:
        gradients: At least one gradient, as `resolve_conj_neg` returns them, all on one device. They are not changed.

    Returns:
        One flag per gradient that is 1 if an element is not finite, else 0: float32, on their device.

    >>> nonfinite_flags([torch.ones(2), torch.tensor([float("inf")])])
    tensor([0., 1.])
    """
    parts = [_coalesced_elements(gradient) for gradient in gradients]
    if parts[0].device.type == "cpu":
        # The dtype and the device are given, because you may have changed the defaults, and the kernel accepts no
        # others.
        flags = torch.zeros(len(parts), dtype=torch.float32, device=CPU)
        one = torch.ones((), dtype=torch.float32, device=CPU)
        for part, flag in zip(parts, flags.unbind(), strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_([part], flag, one)
        return flags
    # A single kernel computes the maximum of each gradient. On a CPU that takes sixteen times as long as the check
    # above. An empty tensor has no maximum.
    present = [part if part.numel() else part.new_zeros(()) for part in parts]
    # In deterministic mode, an accelerator would start another kernel to fill each of many small tensors.
    with temporarily(torch.utils.deterministic, fill_uninitialized_memory=False):
        norms = list(torch._foreach_norm(present, math.inf))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    # 0 times a number that is not finite is a NaN, which differs from 0.
    return torch.stack(norms).mul_(0.0).ne_(0.0).float()


def first_nonfinite(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Find the first tensor that holds an infinity or a NaN, and wait for its device to do so.

    Args:
        tensors: The tensors by name, all on one device; None for missing ones.

    Returns:
        The name of the tensor; None if all elements are finite.

    >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
    'b'
    """
    present = {name: resolve_conj_neg(tensor) for name, tensor in tensors.items() if tensor is not None}
    return first_flagged(list(present), nonfinite_flags(list(present.values()))) if present else None


def first_flagged(names: Sequence[str], flags: Tensor) -> str | None:
    """Return the first name whose flag is set, after waiting for the device.

    Args:
        names: One name per flag.
        flags: The flags, as `nonfinite_flags` returned them.
    """
    return next((name for name, flag in zip(names, flags.tolist(), strict=True) if flag), None)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one, after resolving them.

    Args:
        parameters: The parameters. A gradient that had to be resolved is replaced.
    """
    found: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = resolve_conj_neg(parameter.grad)
            if gradient is not parameter.grad:
                parameter.grad = gradient
            found.append(gradient)
    return found


def resolve_conj_neg(gradient: Tensor) -> Tensor:
    """Return a tensor with its elements in memory as they are, not merely marked as conjugate or negative.

    Args:
        gradient: The tensor. It is usually returned as it is.
    """
    marked = gradient.is_conj() or gradient.is_neg()
    return gradient.resolve_conj().resolve_neg() if marked else gradient


def to_device(number: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Only a copy to the CPU waits.

    Args:
        number: The tensor.
        device: The device of the result.
    """
    # A copy to the CPU must wait: the host could read it at once, before it has arrived.
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy data to a device if it is elsewhere, from the host by way of pinned memory and without waiting for it.

    Args:
        tensor: The tensor. If it is in pinned memory, it must not be written to before the device has read it.
        device: The device of the result.
    """
    if tensor.device == device:
        return tensor
    # Never asynchronously to the CPU: the host would read memory before the data has arrived.
    if device.type in {"cpu", "meta"}:
        return tensor.to(device)
    # A copy from pageable memory would wait for all work of the stream, once per field and shard. The allocator of
    # pinned memory keeps what a copy reads until the device has read it.
    if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_pinned():
        # Not by `pin_memory`, which refuses tensors whose elements share memory.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _check_and_multiply_(groups: TensorGroups, inverse: float, device: torch.device) -> Tensor:
    """Multiply by the inverse of a factor and check, by one kernel of torch per group, and merge the flags."""
    flags = []
    for (there, dtype), values in groups.items():
        if dtype in _NOT_CHECKED_BY_CUDA and there.type == "cuda":
            # A power of two rounds nothing.
            if inverse != 1.0:
                torch._foreach_mul_(values, inverse)
            flags.append(to_device(nonfinite_flags(values).amax(), device))
            continue
        # The dtype is given, because you may have changed the default, and the kernel accepts no other.
        flag = torch.zeros((), dtype=torch.float32, device=there)
        factor = torch.full((), inverse, dtype=torch.float32, device=there)
        torch._amp_foreach_non_finite_check_and_unscale_(values, flag, factor)
        flags.append(to_device(flag, device))
    if len(flags) == 1:
        return flags[0]
    return torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=device)


def _group(parts: Iterable[Tensor]) -> TensorGroups:
    """Group the elements of gradients by device and dtype."""
    groups: TensorGroups = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    return groups


def _elements(gradient: Tensor) -> Tensor:
    """Return a view of the dense real numbers that a gradient stores."""
    # With gradients disabled, `values()` returns a copy.
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - see above
    return torch.view_as_real(values) if values.is_complex() else values


def _coalesced_elements(gradient: Tensor) -> Tensor:
    """Return the dense real numbers of a gradient, after adding up the parts of a sparse one."""
    return _elements(gradient.coalesce() if gradient.is_sparse else gradient)


def _all_sums_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all gradients have finite sums, and therefore finite elements.

    Returns:
        If False, the elements may still be finite: a sum may overflow, and not every kind of gradient is summed.
    """
    for gradient in gradients:
        if not gradient.is_cpu or gradient.layout is not torch.strided or gradient.dtype not in _SUMMABLE:
            return False
        # A sum with an infinity or a NaN among its terms is never finite.
        if not math.isfinite(gradient.sum().item()):
            return False
    return True


def _divides_exactly(factor: float) -> bool:
    """Return whether division by a factor can neither round a normal number nor overflow."""
    return 1.0 <= factor <= _LARGEST_INVERTIBLE and math.frexp(factor)[0] == _MANTISSA_OF_POWERS
