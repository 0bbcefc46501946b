"""Combine the changes that shards made to buffers, where the host knows which buffers each shard changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from lockstep.precision import to_device
from lockstep.replicas.buffers.buffer_refs import BufferRef
from lockstep.tree import PartialSum, ShardSum, Tensors, total

_INTEGER_DTYPES: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The integer dtype as which the bits of a number are compared, by the size of the number in bytes."""


@dataclass(slots=True)
class BufferSum:
    """The changes that the shards of one device made to the buffers.

    Attributes:
        weighted_sums: The sums of weight times value in the order of the tree, with complex buffers as pairs of real
            numbers.
        weights: For each buffer the total weight of the shards that changed it.
        firsts: For each buffer the value from the first shard that changed it.
    """

    weighted_sums: ShardSum
    weights: list[float]
    firsts: Tensors

    @classmethod
    def empty(cls, first: int, size: int) -> BufferSum:
        """Return a sum without shards.

        Args:
            first: The number of the first shard that will be added.
            size: The number of buffers.
        """
        return cls(ShardSum(first), [0.0] * size, [None] * size)

    def add(self, shard: int, values: Tensors, starts: Tensors, weight: float, *, mean: bool) -> list[bool]:
        """Add the buffers after one shard.

        Args:
            shard: The number of the shard.
            values: The value of each buffer after the shard, with the format of the buffer. None counts as unchanged.
            starts: The value of each buffer before the shard.
            weight: The weight of the shard.
            mean: Whether floating-point and complex buffers are averaged.

        Returns:
            For each buffer whether the shard changed it.
        """
        shares: Tensors = [None] * len(values)
        changed = [False] * len(values)
        for index, (value, start) in enumerate(zip(values, starts, strict=True)):
            if value is None or start is None or torch.equal(as_bits(value), as_bits(start)):
                continue
            changed[index] = True
            self.weights[index] += weight
            if mean and is_averaged(start):
                shares[index] = as_real(value) * weight
            elif self.firsts[index] is None:
                # Cloned, because the replica writes the next shard's buffers to the same memory.
                self.firsts[index] = value.clone()
        self.weighted_sums.push(shard, shares)
        return changed

    def resolve(self) -> BufferSum:
        """Return this sum, for which no data has to be read from a device."""
        return self


def combine_known(
    sums: Sequence[BufferSum], refs: Sequence[BufferRef], *, weight: float, found_inf: Tensor | None
) -> None:
    """Write the combined buffers of all shards to the model, as `combine_buffers` describes.

    Args:
        sums: One sum per device, in order of shards.
        refs: The buffers of the model.
        weight: The total weight of all shards.
        found_inf: A tensor without dimensions. If it is above 0, the buffers keep their values.
    """
    partials = [
        PartialSum(partial.shard, [_move(tensor, ref) for tensor, ref in zip(partial.tensors, refs, strict=True)])
        for device_sum in sums
        for partial in device_sum.weighted_sums.partials
    ]
    for index, (ref, mean) in enumerate(zip(refs, total(partials), strict=True)):
        target = ref.get()
        value = next((device_sum.firsts[index] for device_sum in sums if device_sum.firsts[index] is not None), None)
        if target is None:
            continue
        if mean is not None:
            # Shards that left the buffer unchanged count with the old value, so that the weights of all shards add up.
            absent = weight - sum(device_sum.weights[index] for device_sum in sums)
            # Divided once, at the end. With `absent` equal to 0, adding 0 · target would still turn NaN and infinity
            # into NaN.
            value = from_real((mean if absent == 0 else mean + as_real(target) * absent) / weight, target)
        if value is not None:
            # `torch.where` instead of a condition, which would wait for the device.
            new = value if found_inf is None else torch.where(to_device(found_inf, target.device) > 0, target, value)
            target.copy_(new)


def is_averaged(buffer: Tensor) -> bool:
    """Return whether the rule "mean" averages a buffer.

    Args:
        buffer: The buffer.
    """
    return buffer.is_floating_point() or buffer.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as real numbers, where a complex number is two of them along a last dimension.

    Args:
        tensor: The tensor, of any dtype.
    """
    # A lazily conjugated or negated tensor cannot be viewed as other numbers.
    plain = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def from_real(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return numbers in the dtype of a tensor, which reverses `as_real`.

    Args:
        numbers: The real numbers.
        tensor: The tensor whose dtype decides.
    """
    return torch.view_as_complex(numbers) if tensor.is_complex() else numbers


def as_bits(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as integers with the same bits, so that NaN equals NaN and -0.0 is not 0.0.

    Args:
        tensor: The tensor, of any dtype.
    """
    # `torch.equal` compares quantized tensors by their integers already, and they cannot be viewed.
    if tensor.is_quantized:
        return tensor
    numbers = as_real(tensor)
    return numbers.view(_INTEGER_DTYPES[numbers.itemsize])


def _move(tensor: Tensor | None, ref: BufferRef) -> Tensor | None:
    """Move a tensor to the device of the buffer that it belongs to."""
    target = ref.get()
    return None if tensor is None or target is None else to_device(tensor, target.device)
