"""Combine the changes that shards made to buffers.

On a CPU it costs nothing to check whether a shard changed a buffer. On another device the host would have to wait for
the result once per shard. There the result stays on the device, and `torch.where` selects the values that depend on it.
The bits are the same: a shard that does not contribute to a sum adds -0.0, which changes no number, neither 0.0 nor
-0.0. Buffers of the same format are then concatenated in one tensor, so that the number of kernels does not depend on
the number of buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lockstep.precision import divide_, to_device
from lockstep.replicas.buffers.buffer_refs import BufferRef, BufferRule
from lockstep.tree import PartialSum, ShardSum, Tensors, total

_INTEGER_DTYPES: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The integer dtype as which the bits of a number are compared, by the size of the number in bytes."""

EXTREMES: Final = MappingProxyType({"min": torch.minimum, "max": torch.maximum})
"""The functions of the rules by which the values of two shards become one."""

Number: TypeAlias = Any
"""A number that the host knows, or a tensor on the device with one for each buffer or number of a pack."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Buffers that are computed with together: a single one, or all of one format, device and rule in one tensor.

    Attributes:
        indices: The indices of the buffers.
        shapes: The shapes of their numbers, with complex numbers as pairs.
        owner: For each number the position in `indices` of the buffer that it belongs to; None for a single buffer, of
            which the host finds out whether it has changed.
        rule: The rule of these buffers.
        averaged: Whether this rule averages them.
    """

    indices: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    owner: Tensor | None
    rule: BufferRule
    averaged: bool

    def select(self, buffers: Sequence[Tensor | None]) -> list[Tensor]:
        """List those of all buffers that belong to this pack.

        Args:
            buffers: The buffers of the model.
        """
        return [buffer for index in self.indices if (buffer := buffers[index]) is not None]

    def pack(self, buffers: Sequence[Tensor | None]) -> Tensor:
        """Return the numbers of the buffers of this pack.

        Args:
            buffers: The buffers of the model.
        """
        own = self.select(buffers)
        if self.owner is None:
            return as_real(own[0])
        # Every call takes time for each of what may be hundreds of buffers, and most are vectors of real numbers.
        numbers = list(map(as_real, own)) if own[0].is_complex() else own
        return torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in numbers])

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Split the numbers of this pack by buffer, each part in the shape of the numbers of its buffer.

        Args:
            numbers: The numbers, as `pack` returns them.
        """
        if self.owner is None:
            return [numbers]
        parts = torch.split(numbers, [shape.numel() for shape in self.shapes])
        return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def changed(self, before: Tensor, after: Tensor) -> Number:
        """Return for each buffer whether its bits have changed, as 1.0 or 0.0.

        Args:
            before: The numbers of this pack before a shard.
            after: The numbers of this pack after the shard.
        """
        if self.owner is None:
            return float(not torch.equal(as_bits(after), as_bits(before)))
        differ = (as_bits(after) != as_bits(before)).int()
        none = torch.zeros(len(self.indices), dtype=torch.int32, device=differ.device)
        # In float64, in which weights are added without rounding, as the host does it.
        return none.scatter_reduce_(0, self.owner, differ, "amax").double()

    def spread(self, by_buffer: Number) -> Number:
        """Return for each number of this pack what belongs to its buffer.

        Args:
            by_buffer: The numbers by buffer, on any device.
        """
        if self.owner is None or not isinstance(by_buffer, Tensor):
            return by_buffer
        return by_buffer[to_device(self.owner, by_buffer.device)]


def can_be_packed(buffer: Tensor) -> bool:
    """Return whether a buffer is an ordinary array of numbers that torch can compute with.

    Args:
        buffer: The buffer.
    """
    # One-byte floating-point formats have no arithmetic, and an expanded tensor cannot be written in place.
    return (
        buffer.layout is torch.strided
        and not (buffer.is_quantized or buffer.is_conj() or buffer.is_neg())
        and (buffer.itemsize > 1 or not buffer.is_floating_point())
        and 0 not in buffer.stride()
    )


def create_packs(buffers: Sequence[Tensor | None], rules: Sequence[BufferRule], *, together: bool) -> list[Pack]:
    """Return the packs of all buffers that are present.

    Args:
        buffers: The buffers of a model.
        rules: The rule of each buffer.
        together: Whether those of one format, device and rule are in one pack, so that the host need not learn which of
            them change. Otherwise each has one of its own.
    """
    kinds: dict[object, list[int]] = {}
    for index, (buffer, rule) in enumerate(zip(buffers, rules, strict=True)):
        if buffer is not None:
            kinds.setdefault((buffer.device, buffer.dtype, rule) if together else index, []).append(index)
    packs: list[Pack] = []
    for indices in kinds.values():
        own = [buffer for index in indices if (buffer := buffers[index]) is not None]
        shapes, owner, rule = tuple(as_real(buffer).shape for buffer in own), None, rules[indices[0]]
        if together:
            sizes = torch.tensor([shape.numel() for shape in shapes], device="cpu")
            owner = torch.arange(len(shapes), device="cpu").repeat_interleave(sizes)
            owner = to_device(owner, own[0].device)
        packs.append(Pack(tuple(indices), shapes, owner, rule, rule == "mean" and is_averaged(own[0])))
    return packs


@dataclass(slots=True)
class BufferSum:
    """The changes that the shards of one device made to the buffers, in packs.

    Attributes:
        weighted_sums: For each pack the sums of weight times value in the order of the tree, with complex buffers as
            pairs of real numbers; by the rule "sum" those of the changes.
        weights: For each buffer of a pack the total weight of the shards that changed it; by the rule "sum" their
            number.
        firsts: For each pack the value from the first shard that changed it, or the smallest or largest one; arbitrary
            where the weight is 0.
        packs: The buffers that are computed with together; empty if each buffer is a pack and no shard is added.
        starts: The buffers before the shards.
        compares: Whether shards are compared in buffers that have no mean.
        packed: The numbers of `starts`, by pack; empty until they are compared with.
        differing: For each buffer of a pack, above 0 if it has no mean and shards changed it to different values.
    """

    weighted_sums: ShardSum
    weights: list[Number] = field(default_factory=list)
    firsts: Tensors = field(default_factory=list)
    packs: Sequence[Pack] = ()
    starts: Sequence[Tensor] = ()
    compares: bool = True
    packed: list[Tensor] = field(default_factory=list)
    differing: list[Number] = field(default_factory=list)

    @classmethod
    def empty(cls, first: int, starts: Sequence[Tensor], packs: Sequence[Pack], *, compares: bool = True) -> BufferSum:
        """Return a sum without shards.

        Args:
            first: The number of the first shard that will be added.
            starts: The value of each buffer before the shards.
            packs: The packs of the buffers.
            compares: Whether shards are compared in buffers that have no mean, for `check_buffers`.
        """
        zeros: list[Number] = [0.0] * len(packs)
        return cls(ShardSum(first), zeros, [None] * len(packs), packs, starts, compares, [], zeros.copy())

    def add(self, shard: int, values: Tensors, weight: float, *, alone: bool = False) -> list[bool]:
        """Add the buffers after one shard.

        Args:
            shard: The number of the shard.
            values: The value of each buffer after the shard, with the format of the buffer. None counts as unchanged.
            weight: The weight of the shard.
            alone: Whether the update has no other shard, so that all it leaves is taken as it is.

        Returns:
            For each buffer whether the shard may have changed it.
        """
        shares: Tensors = [None] * len(self.packs)
        may_differ = [True] * len(values)
        present = [start if value is None else value for value, start in zip(values, self.starts, strict=True)]
        if alone and not self.is_known:
            self.firsts, self.weights = [pack.pack(present) for pack in self.packs], [weight] * len(self.packs)
            self.weighted_sums.push(shard, shares)
            return may_differ
        self.packed = self.packed or [pack.pack(self.starts) for pack in self.packs]
        for index, (pack, before) in enumerate(zip(self.packs, self.packed, strict=True)):
            numbers = pack.pack(present)
            changed = pack.changed(before, numbers)
            if not isinstance(changed, Tensor) and not changed:
                may_differ[index] = False
                continue
            is_changed = pack.spread(changed) > 0
            if pack.averaged:
                # -0.0 is the neutral element of addition: x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0.
                shares[index] = _choose(is_changed, numbers * weight, -0.0)
            else:
                if pack.rule == "sum":
                    zero = -0.0 if numbers.is_floating_point() else 0
                    shares[index] = _choose(is_changed, numbers - before, zero)
                self._keep_first(index, numbers, is_changed)
            self.weights[index] = self.weights[index] + changed * (1.0 if pack.rule == "sum" else weight)
        self.weighted_sums.push(shard, shares)
        return may_differ

    def _keep_first(self, index: int, numbers: Tensor, is_changed: bool | Tensor) -> None:
        """Keep what buffers without a mean have been changed to: the first value, or the smaller or larger one."""
        kept, pack = self.firsts[index], self.packs[index]
        if kept is None:
            # Cloned, because the replica writes the next shard's buffers to the same memory.
            self.firsts[index] = numbers.clone()
            return
        # The weight is above 0 as soon as one shard has changed the buffer.
        has_first = pack.spread(self.weights[index]) > 0
        if pack.rule == "mean" and self.compares:
            differs = pack.changed(_choose(has_first & is_changed, kept, numbers), numbers)
            self.differing[index] = self.differing[index] + differs
        if pack.rule in EXTREMES:
            kept = _choose(is_changed, EXTREMES[pack.rule](kept, numbers), kept)
        self.firsts[index] = _choose(has_first, kept, numbers)

    @property
    def is_known(self) -> bool:
        """Whether the host knows which buffers have changed."""
        return all(pack.owner is None for pack in self.packs)

    def resolve(self) -> BufferSum:
        """Return the changes by buffer. This waits for the device, once for all buffers, if they are not known."""
        read = [each for each in (*self.weights, *self.differing) if isinstance(each, Tensor)]
        numbers = iter(torch.cat(read).tolist() if read else ())

        def by_buffer(flags: Sequence[Number]) -> list[Number]:
            found: list[Number] = [0.0] * len(self.starts)
            for pack, flag in zip(self.packs, flags, strict=True):
                for index in pack.indices:
                    found[index] = next(numbers) if isinstance(flag, Tensor) else flag
            return found

        weights, differing = by_buffer(self.weights), by_buffer(self.differing)
        sums = ShardSum(self.weighted_sums.first)
        for partial in self.weighted_sums.partials:
            sums.partials.append(PartialSum(partial.shard, self._split(partial.tensors, weights)))
        pairs = zip(self._split(self.firsts, weights), self.starts, strict=True)
        firsts = [None if first is None else from_real(first, start) for first, start in pairs]
        return BufferSum(sums, weights, firsts, differing=differing)

    def _split(self, packed: Tensors, weights: Sequence[Number]) -> Tensors:
        """Return the numbers of each buffer in its shape; None for a buffer that no shard changed."""
        found: Tensors = [None] * len(self.starts)
        for pack, numbers in zip(self.packs, packed, strict=True):
            if numbers is not None:
                for index, part in zip(pack.indices, pack.split(numbers), strict=True):
                    found[index] = part if weights[index] else None
        return found


def combine_buffers(
    sums: Sequence[BufferSum], refs: Sequence[BufferRef], *, weight: float, found_inf: Tensor | None = None
) -> None:
    """Write the combined buffers of all shards to the model, without waiting for a device.

    Args:
        sums: One sum per device, in order of shards and all with the same packs. They are changed in place.
        refs: The buffers of the model, which are written in place, each on its own device.
        weight: The total weight of all shards.
        found_inf: A tensor without dimensions. If it is above 0, the buffers keep their values.

    Determinism: The bits depend only on the shards. Sums follow the tree and are divided once.
    """
    buffers = [ref.get() for ref in refs]
    packs = sums[0].packs or create_packs(buffers, [ref.rule for ref in refs], together=False)
    homes = [pack.select(buffers)[0].device for pack in packs]
    partials = [
        PartialSum(partial.shard, list(map(_on, partial.tensors, homes)))
        for device_sum in sums
        for partial in device_sum.weighted_sums.partials
    ]
    for index, (pack, home, summed) in enumerate(zip(packs, homes, total(partials), strict=True)):
        weights = [pack.spread(_on(each.weights[index], home)) for each in sums]
        changed = sum(weights)
        if not isinstance(changed, Tensor) and not changed:
            continue
        before, targets = pack.pack(buffers), pack.select(buffers)
        if pack.averaged and summed is not None:
            value = _mean(before, summed, weight, changed)
        else:
            firsts = [_on(each.firsts[index], home) for each in sums]
            value = _first(weights, firsts, pack.rule)
            if summed is not None:
                # The value of a single shard is used as it is, because x + (y - x) is not always y.
                value = _choose(changed > 1, before + summed, value)
        keeps = changed == 0
        if found_inf is not None:
            skips = to_device(found_inf, home) > 0
            keeps = keeps | skips if isinstance(keeps, Tensor) else skips
        parts = pack.split(_choose(keeps, before, value))
        torch._foreach_copy_(targets, list(map(torch.view_as_complex, parts)) if targets[0].is_complex() else parts)


def _mean(before: Tensor, summed: Tensor, weight: float, changed: Number) -> Tensor:
    """Return the mean over all shards, of which those that left a buffer unchanged count with the old value."""
    absent = weight - changed
    # As torch multiplies by a Python number: half precision in float32, rounded once.
    wide = before.float() if before.itemsize < torch.float32.itemsize else before
    share = absent.to(wide.dtype) if isinstance(absent, Tensor) else absent
    # Selected, because 0 · NaN and 0 · infinity would not leave the sum unchanged.
    completed = _choose(absent == 0, summed, summed + (wide * share).to(before.dtype))
    divide_([completed], weight)
    return completed


def _first(weights: Sequence[Number], firsts: Tensors, rule: BufferRule) -> Tensor:
    """Return the value from the first device on which a shard changed a buffer, or the smallest or largest value."""
    pairs = [(weight, as_real(first)) for weight, first in zip(weights, firsts, strict=True) if first is not None]
    weight, chosen = pairs.pop()
    has = weight > 0
    for weight, first in reversed(pairs):
        nearer = _choose(has, EXTREMES[rule](first, chosen), first) if rule in EXTREMES else first
        chosen, has = _choose(weight > 0, nearer, chosen), has | (weight > 0)
    return chosen


def merged_firsts(rule: BufferRule, firsts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the value that a buffer without a mean gets from several devices or ranks, or None if none changed it.

    Args:
        rule: The rule of the buffer.
        firsts: The value of each, in order of shards.
    """
    found = [first for first in firsts if first is not None]
    if rule in EXTREMES and found:
        return reduce(EXTREMES[rule], [to_device(first, found[0].device) for first in found])
    return found[0] if found else None


def _choose(condition: bool | Tensor, value: Tensor, other: Tensor | float) -> Tensor:
    """Return one of two values, on the device if the condition is there; if the host knows it, it is never a number."""
    if isinstance(condition, Tensor):
        return torch.where(condition, value, other)
    return value if condition or not isinstance(other, Tensor) else other


def _on(tensor: Any, device: torch.device) -> Any:
    """Return a tensor on a device; anything else as it is."""
    return to_device(tensor, device) if isinstance(tensor, Tensor) else tensor


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
