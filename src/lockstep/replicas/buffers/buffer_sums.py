"""Combine the changes that shards made to buffers, where the host knows which buffers each shard changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from lockstep.precision import to_device
from lockstep.replicas.buffers.buffer_refs import BufferRef, BufferRule
from lockstep.tree import PartialSum, ShardSum, Tensors, total

_INTEGER_DTYPES: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The integer dtype as which the bits of a number are compared, by the size of the number in bytes."""

EXTREMES: Final = MappingProxyType({"min": torch.minimum, "max": torch.maximum})
"""The functions of the rules by which the values of two shards become one."""


@dataclass(slots=True)
class BufferSum:
    """The changes that the shards of one device made to the buffers.

    Attributes:
        weighted_sums: The sums of weight times value in the order of the tree, with complex buffers as pairs of real
            numbers; by the rule "sum" those of the changes.
        weights: For each buffer the total weight of the shards that changed it; by the rule "sum" their number.
        firsts: For each buffer the value from the first shard that changed it; by the rules "min" and "max" the
            smallest and the largest one.
        rules: The rule of each buffer, while shards are added.
        differing: The indices of buffers that have no mean and that shards changed to different values.
    """

    weighted_sums: ShardSum
    weights: list[float]
    firsts: Tensors
    rules: Sequence[BufferRule] = ()
    differing: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, first: int, rules: Sequence[BufferRule]) -> BufferSum:
        """Return a sum without shards.

        Args:
            first: The number of the first shard that will be added.
            rules: The rule of each buffer.
        """
        return cls(ShardSum(first), [0.0] * len(rules), [None] * len(rules), rules)

    def add(self, shard: int, values: Tensors, starts: Tensors, weight: float) -> list[bool]:
        """Add the buffers after one shard.

        Args:
            shard: The number of the shard.
            values: The value of each buffer after the shard, with the format of the buffer. None counts as unchanged.
            starts: The value of each buffer before the shard.
            weight: The weight of the shard.

        Returns:
            For each buffer whether the shard changed it.
        """
        shares: Tensors = [None] * len(values)
        changed = [False] * len(values)
        for index, (value, start, rule) in enumerate(zip(values, starts, self.rules, strict=True)):
            if value is None or start is None:
                continue
            first = self.firsts[index]
            # Usually all shards change a counter alike, so that one comparison is enough.
            is_first = first is not None and torch.equal(as_bits(value), as_bits(first))
            if not is_first and torch.equal(as_bits(value), as_bits(start)):
                continue
            changed[index] = True
            self.weights[index] += 1.0 if rule == "sum" else weight
            if rule == "mean" and is_averaged(start):
                shares[index] = as_real(value) * weight
                continue
            if rule == "sum":
                shares[index] = as_real(value) - as_real(start)
            if first is None:
                # Cloned, because the replica writes the next shard's buffers to the same memory.
                self.firsts[index] = value.clone()
            elif rule in EXTREMES:
                self.firsts[index] = EXTREMES[rule](first, value)
            elif rule == "mean" and not is_first:
                self.differing.add(index)
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
    for index, (ref, summed) in enumerate(zip(refs, total(partials), strict=True)):
        target = ref.get()
        if target is None:
            continue
        value = merged_firsts(ref.rule, [each.firsts[index] for each in sums])
        weights = sum(device_sum.weights[index] for device_sum in sums)
        if summed is not None and ref.rule != "sum":
            # Shards that left the buffer unchanged count with the old value, so that the weights of all shards add up.
            absent = weight - weights
            # Divided once, at the end. With `absent` equal to 0, adding 0 · target would still turn NaN and infinity
            # into NaN.
            value = from_real((summed if absent == 0 else summed + as_real(target) * absent) / weight, target)
        elif summed is not None and weights > 1:
            # The value of a single shard is used as it is, because x + (y - x) is not always y.
            value = from_real(as_real(target) + summed, target)
        if value is not None:
            # `torch.where` instead of a condition, which would wait for the device.
            new = value if found_inf is None else torch.where(to_device(found_inf, target.device) > 0, target, value)
            target.copy_(new)


def merged_firsts(rule: BufferRule, firsts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the first of the values that devices or ranks have found for a buffer, or their smallest or largest one.

    Args:
        rule: The rule of the buffer.
        firsts: The values, in order of shards, as `BufferSum.firsts` holds them.
    """
    found = [first for first in firsts if first is not None]
    if rule in EXTREMES and found:
        return reduce(EXTREMES[rule], [to_device(first, found[0].device) for first in found])
    return found[0] if found else None


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
