"""Combine the changes that shards made to buffers, without waiting for a device to learn which buffers changed.

On a CPU it costs nothing to check whether a shard changed a buffer. On another device the host would have to wait for
the result once per shard. The result therefore stays on the device, and `torch.where` selects the values that depend on
it. The bits are the same: a shard that does not contribute to a sum adds -0.0, which changes no number, neither 0.0 nor
-0.0. Buffers of the same format are concatenated in one tensor, a pack, so that the number of kernels does not depend
on the number of buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.precision import to_device
from lockstep.replicas.buffers.buffer_refs import BufferRef, BufferRule
from lockstep.replicas.buffers.buffer_sums import EXTREMES, BufferSum, as_bits, as_real, from_real, is_averaged
from lockstep.tree import PartialSum, ShardSum, Tensors, total


@dataclass(frozen=True, slots=True)
class Pack:
    """The positions of the buffers of one format, device and rule in one tensor.

    Attributes:
        indices: The indices of the buffers.
        shapes: The shapes of their numbers, with complex numbers as pairs.
        owner: For each number the position in `indices` of the buffer that it belongs to.
        rule: The rule of these buffers.
        averaged: Whether this rule averages them.
    """

    indices: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    owner: Tensor
    rule: BufferRule
    averaged: bool

    @classmethod
    def of(cls, indices: Sequence[int], buffers: Sequence[Tensor], rule: BufferRule) -> Pack:
        """Return the pack of some buffers.

        Args:
            indices: The indices of the buffers.
            buffers: The buffers, which have the same dtype and device.
            rule: The rule of these buffers.
        """
        shapes = tuple(as_real(buffer).shape for buffer in buffers)
        sizes = torch.tensor([shape.numel() for shape in shapes], device="cpu")
        owner = torch.arange(len(shapes), device="cpu").repeat_interleave(sizes)
        averaged = rule == "mean" and is_averaged(buffers[0])
        return cls(tuple(indices), shapes, to_device(owner, buffers[0].device), rule, averaged)

    def select(self, buffers: Tensors) -> list[Tensor]:
        """List those of all buffers that belong to this pack.

        Args:
            buffers: The buffers of the model.
        """
        return [buffer for index in self.indices if (buffer := buffers[index]) is not None]

    def pack(self, buffers: Tensors) -> Tensor:
        """Concatenate the numbers of the buffers of this pack.

        Args:
            buffers: The buffers of the model.
        """
        return torch.cat([as_real(buffer).reshape(-1) for buffer in self.select(buffers)])

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Split the numbers of this pack by buffer, each part in the shape of the numbers of its buffer.

        Args:
            numbers: The numbers, as `pack` returns them.
        """
        parts = torch.split(numbers, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def changed(self, before: Tensor, after: Tensor) -> Tensor:
        """Return for each buffer whether its bits have changed, as 1 or 0 in int32.

        Args:
            before: The numbers of this pack before a shard.
            after: The numbers of this pack after the shard.
        """
        differ = (as_bits(after) != as_bits(before)).int()
        none = torch.zeros(len(self.indices), dtype=torch.int32, device=differ.device)
        return none.scatter_reduce_(0, self.owner, differ, "amax")


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


def create_packs(buffers: Tensors, rules: Sequence[BufferRule]) -> list[Pack]:
    """Return the packs of all buffers that are present.

    Args:
        buffers: The buffers of a model.
        rules: The rule of each buffer.
    """
    kinds: dict[tuple[torch.device, torch.dtype, BufferRule], list[int]] = {}
    for index, (buffer, rule) in enumerate(zip(buffers, rules, strict=True)):
        if buffer is not None:
            kinds.setdefault((buffer.device, buffer.dtype, rule), []).append(index)
    return [
        Pack.of(indices, [buffer for index in indices if (buffer := buffers[index]) is not None], rule)
        for (_, _, rule), indices in kinds.items()
    ]


@dataclass(slots=True)
class DeferredBufferSum:
    """The changes that the shards of one device made to the buffers, in packs.

    Attributes:
        packs: The positions of the buffers.
        starts: The buffers before the shards.
        packed: The numbers of `starts`, packed.
        weighted_sums: The sums of weight times value, in the order of the tree.
        weights: For each buffer of a pack the total weight of the shards that changed it, in float64, or None before
            the first shard.
        firsts: The value of a buffer from the first shard that changed it, or the smallest or largest one, which is
            arbitrary if its weight is 0.
        differing: For each buffer of a pack, above 0 where shards differ although it has no mean; None if this is not
            compared.
        compares: Whether buffers that have no mean are compared.
    """

    packs: Sequence[Pack]
    starts: Tensors
    packed: list[Tensor]
    weighted_sums: ShardSum
    weights: Tensors
    firsts: Tensors
    differing: Tensors
    compares: bool

    @classmethod
    def empty(cls, first: int, starts: Tensors, packs: Sequence[Pack], *, compares: bool = False) -> DeferredBufferSum:
        """Return a sum without shards.

        Args:
            first: The number of the first shard that will be added.
            starts: The buffers before the shards.
            packs: The positions of the buffers.
            compares: Whether buffers that have no mean are compared.
        """
        none: Tensors = [None] * len(packs)
        packed = [pack.pack(starts) for pack in packs]
        return cls(packs, starts, packed, ShardSum(first), none, none.copy(), none.copy(), compares)

    def add(self, shard: int, values: Tensors, starts: Tensors, weight: float) -> list[bool]:
        """Add the buffers after one shard.

        Args:
            shard: The number of the shard.
            values: The value of each buffer after the shard, with the format of the buffer. None counts as unchanged.
            starts: The value of each buffer before the shard.
            weight: The weight of the shard.

        Returns:
            For each buffer whether the shard may have changed it, which is always True.
        """
        shares: Tensors = [None] * len(self.packs)
        present = [start if value is None else value for value, start in zip(values, starts, strict=True)]
        for index, pack in enumerate(self.packs):
            numbers = pack.pack(present)
            changed = pack.changed(self.packed[index], numbers)
            is_changed = changed[pack.owner] > 0
            if pack.averaged:
                # -0.0 is the neutral element of addition: x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0.
                shares[index] = torch.where(is_changed, numbers * weight, -0.0)
            else:
                if pack.rule == "sum":
                    zero = -0.0 if numbers.is_floating_point() else 0
                    shares[index] = torch.where(is_changed, numbers - self.packed[index], zero)
                self._keep_first(index, numbers, is_changed)
            # In float64, in which weights are added without rounding, as the host does it in `BufferSum`.
            share = changed.double() * (1.0 if pack.rule == "sum" else weight)
            before = self.weights[index]
            self.weights[index] = share if before is None else before + share
        self.weighted_sums.push(shard, shares)
        return [True] * len(values)

    def _keep_first(self, index: int, numbers: Tensor, is_changed: Tensor) -> None:
        kept, weights, rule = self.firsts[index], self.weights[index], self.packs[index].rule
        if kept is not None and weights is not None:
            # The weight is above 0 as soon as one shard has changed the buffer.
            has_first = weights[self.packs[index].owner] > 0
            if rule == "mean" and self.compares:
                pack, before = self.packs[index], self.differing[index]
                differs = pack.changed(torch.where(has_first & is_changed, kept, numbers), numbers).double()
                self.differing[index] = differs if before is None else differs + before
            other = torch.where(is_changed, EXTREMES[rule](kept, numbers), kept) if rule in EXTREMES else kept
            numbers = torch.where(has_first, other, numbers)
        self.firsts[index] = numbers

    def resolve(self) -> BufferSum:
        """Return the same sum by buffer, without buffers that no shard changed. This waits for the device once."""
        known = BufferSum.empty(self.weighted_sums.first, self._rules())
        present = [weights for weights in self.weights if weights is not None]
        if not present:
            return known
        order = [index for pack in self.packs for index in pack.indices]
        differing = [(pack, flags) for pack, flags in zip(self.packs, self.differing, strict=True) if flags is not None]
        numbers = iter(torch.cat([*present, *(flags for _, flags in differing)]).tolist())
        for index in order:
            known.weights[index] = next(numbers)
        known.differing.update(index for pack, _ in differing for index in pack.indices if next(numbers))
        for partial in self.weighted_sums.partials:
            taken = self._split_packs(partial.tensors, known.weights)
            known.weighted_sums.partials.append(PartialSum(partial.shard, taken))
        firsts = self._split_packs(self.firsts, known.weights)
        known.firsts = [
            None if first is None or start is None else from_real(first, start)
            for first, start in zip(firsts, self.starts, strict=True)
        ]
        return known

    def _rules(self) -> list[BufferRule]:
        rules: list[BufferRule] = ["mean"] * len(self.starts)
        for pack in self.packs:
            for index in pack.indices:
                rules[index] = pack.rule
        return rules

    def _split_packs(self, packed: Tensors, weights: Sequence[float]) -> Tensors:
        found: Tensors = [None] * len(self.starts)
        for pack, numbers in zip(self.packs, packed, strict=True):
            if numbers is not None:
                for index, part in zip(pack.indices, pack.split(numbers), strict=True):
                    found[index] = part if weights[index] else None
        return found


def combine_packed(
    sums: Sequence[DeferredBufferSum], refs: Sequence[BufferRef], *, weight: float, found_inf: Tensor | None
) -> None:
    """Write the combined buffers of all shards to the model, as `combine_buffers` describes.

    Args:
        sums: One sum per device, in order of shards.
        refs: The buffers of the model.
        weight: The total weight of all shards.
        found_inf: A tensor without dimensions. If it is above 0, the buffers keep their values.
    """
    buffers: Tensors = [ref.get() for ref in refs]
    packs = sums[0].packs
    homes = [pack.select(buffers)[0].device for pack in packs]
    weighted_sums = total(
        [
            PartialSum(partial.shard, _to_devices(partial.tensors, homes))
            for device_sum in sums
            for partial in device_sum.weighted_sums.partials
        ]
    )
    weights = [_to_devices(device_sum.weights, homes) for device_sum in sums]
    firsts = [_to_devices(device_sum.firsts, homes) for device_sum in sums]
    for index, (pack, mean) in enumerate(zip(packs, weighted_sums, strict=True)):
        owner, before = to_device(pack.owner, homes[index]), pack.pack(buffers)
        owned = [share[owner] for each in weights if (share := each[index]) is not None]
        changed = torch.stack(owned).sum(0)
        if pack.averaged and mean is not None:
            value = _mean(before, mean, weight, changed)
        else:
            value = _first(owned, [first for each in firsts if (first := each[index]) is not None], pack.rule)
            if mean is not None:
                value = torch.where(changed > 1, before + mean, value)
        keeps = changed == 0 if found_inf is None else (changed == 0) | (to_device(found_inf, owner.device) > 0)
        targets = pack.select(buffers)
        parts = pack.split(torch.where(keeps, before, value))
        torch._foreach_copy_(targets, list(map(from_real, parts, targets)))


def _mean(before: Tensor, total: Tensor, weight: float, changed: Tensor) -> Tensor:
    """Return the mean, where shards that left a buffer unchanged count with its old value. There is one division."""
    absent = weight - changed
    # As torch multiplies by a Python number: half precision in float32, rounded once.
    wide = before.float() if before.itemsize < torch.float32.itemsize else before
    mixed = total + (wide * absent.to(wide.dtype)).to(before.dtype)
    # Selected, because 0 · NaN and 0 · infinity would not leave the sum unchanged.
    return torch.where(absent == 0, total, mixed) / weight


def _first(weights: Sequence[Tensor], firsts: Sequence[Tensor], rule: BufferRule) -> Tensor:
    """Return for each number the value from the first device with a weight above 0, or the extreme one of all these."""
    chosen, has = firsts[-1], weights[-1] > 0
    for weight, first in zip(reversed(weights[:-1]), reversed(firsts[:-1]), strict=True):
        nearer = torch.where(has, EXTREMES[rule](first, chosen), first) if rule in EXTREMES else first
        chosen, has = torch.where(weight > 0, nearer, chosen), has | (weight > 0)
    return chosen


def _to_devices(tensors: Tensors, devices: Sequence[torch.device]) -> Tensors:
    return [
        None if tensor is None else to_device(tensor, device) for tensor, device in zip(tensors, devices, strict=True)
    ]
