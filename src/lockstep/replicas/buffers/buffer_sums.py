"""Combine what shards made of the buffers, where the host knows which of them they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from lockstep.precision import sent
from lockstep.replicas.buffers.buffer_refs import BufferRef
from lockstep.tree import PartialSum, ShardSum, Tensors, total

_INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""By bytes, what the bits of a number are compared as."""


@dataclass(slots=True)
class BufferSum:
    """What the shards of one place made of the buffers.

    Attributes:
        means: Sums of weight times value, in the tree's order; complex buffers as pairs of real numbers.
        weights: For each buffer, the weights of the shards that changed it.
        firsts: For each buffer, what the first shard that changed it made of it.
    """

    means: ShardSum
    weights: list[float]
    firsts: Tensors

    @classmethod
    def begun(cls, first: int, size: int) -> BufferSum:
        """Begin with no shard; the first to come has this number."""
        return cls(ShardSum(first), [0.0] * size, [None] * size)

    def add(self, shard: int, values: Tensors, starts: Tensors, weight: float, *, mean: bool) -> list[bool]:
        """Add what a shard made of the buffers.

        Args:
            shard: Its number.
            values: One for each buffer, of its format; None counts as left alone.
            starts: What they were before.
            weight: Of the shard.
            mean: Whether buffers of floating-point and complex numbers are averaged.

        Returns:
            For each buffer, whether the shard changed it.
        """
        shares: Tensors = [None] * len(values)
        changed = [False] * len(values)
        for index, (value, start) in enumerate(zip(values, starts, strict=True)):
            if value is None or start is None or torch.equal(bits(value), bits(start)):
                continue
            changed[index] = True
            self.weights[index] += weight
            if mean and is_averaged(start):
                shares[index] = real(value) * weight
            elif self.firsts[index] is None:
                self.firsts[index] = value.clone()
        self.means.push(shard, shares)
        return changed

    def read(self) -> BufferSum:
        """Give the same; there is nothing to wait for."""
        return self


def combine_known(
    sums: Sequence[BufferSum], slots: Sequence[BufferRef], *, weight: float, unless: Tensor | None
) -> None:
    """Make what all shards made of the buffers the model's new buffers; see `combine`."""
    partials = [
        PartialSum(partial.shard, [_moved(tensor, slot) for tensor, slot in zip(partial.tensors, slots, strict=True)])
        for place in sums
        for partial in place.means.partials
    ]
    for index, (slot, mean) in enumerate(zip(slots, total(partials), strict=True)):
        target = slot.get()
        value = next((place.firsts[index] for place in sums if place.firsts[index] is not None), None)
        if target is None:
            continue
        if mean is not None:
            absent = weight - sum(place.weights[index] for place in sums)
            value = like((mean if absent == 0 else mean + real(target) * absent) / weight, target)
        if value is not None:
            new = value if unless is None else torch.where(sent(unless, target.device) > 0, target, value)
            target.copy_(new)


def is_averaged(buffer: Tensor) -> bool:
    """Tell whether a buffer is of those that the rule "mean" averages."""
    return buffer.is_floating_point() or buffer.is_complex()


def real(tensor: Tensor) -> Tensor:
    """Give a tensor's numbers as real ones: a complex number is two of them, along a last dimension."""
    plain = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def like(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Undo `real` for numbers that are to become a tensor's."""
    return torch.view_as_complex(numbers) if tensor.is_complex() else numbers


def bits(tensor: Tensor) -> Tensor:
    """View numbers as integers, among which a NaN is equal to itself and -0.0 is not 0.0."""
    if tensor.is_quantized:
        return tensor
    numbers = real(tensor)
    return numbers.view(_INTEGERS[numbers.itemsize])


def _moved(tensor: Tensor | None, slot: BufferRef) -> Tensor | None:
    """Bring a tensor to where the buffer it is for lives."""
    target = slot.get()
    return None if tensor is None or target is None else sent(tensor, target.device)
