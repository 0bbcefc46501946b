"""Combine what shards made of the buffers, where nobody waits to learn which of them they changed.

On a CPU it costs nothing to look whether a shard changed a buffer. On another device the host would wait for
it once a shard, so there the answer stays on the device, and what follows from it is chosen by `torch.where`.
The bits are the same: a sum in which a shard has no part gets -0.0 from it, which changes no number that it
is added to, neither 0.0 nor itself. Buffers of one format lie end to end in one tensor, a pack, so that few
kernels do it however many buffers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.precision import sent
from lockstep.replicas.buffers.buffer_refs import BufferRef
from lockstep.replicas.buffers.buffer_sums import BufferSum, bits, is_averaged, like, real
from lockstep.tree import PartialSum, ShardSum, Tensors, total


@dataclass(frozen=True, slots=True)
class Pack:
    """Which buffers lie in a tensor, and where: those of one format and device.

    Attributes:
        indices: Which buffers.
        shapes: Of their numbers, complex ones as pairs.
        owner: For each number, whose it is: a position in `indices`.
        averaged: Whether the rule "mean" averages them.
    """

    indices: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    owner: Tensor
    averaged: bool

    @classmethod
    def of(cls, indices: Sequence[int], buffers: Sequence[Tensor]) -> Pack:
        """Lay out buffers."""
        shapes = tuple(real(buffer).shape for buffer in buffers)
        sizes = torch.tensor([shape.numel() for shape in shapes], device="cpu")
        owner = torch.arange(len(shapes), device="cpu").repeat_interleave(sizes)
        return cls(tuple(indices), shapes, sent(owner, buffers[0].device), is_averaged(buffers[0]))

    def chosen(self, buffers: Tensors) -> list[Tensor]:
        """List those of the buffers that are this pack's."""
        return [buffer for index in self.indices if (buffer := buffers[index]) is not None]

    def pack(self, buffers: Tensors) -> Tensor:
        """Lay the numbers of this pack's buffers end to end."""
        return torch.cat([real(buffer).reshape(-1) for buffer in self.chosen(buffers)])

    def parts(self, numbers: Tensor) -> list[Tensor]:
        """Take numbers apart, each part shaped as its buffer's numbers are."""
        pieces = torch.split(numbers, [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def changed(self, before: Tensor, after: Tensor) -> Tensor:
        """Tell for each buffer whether its bits are others now: 1 or 0, int32."""
        differ = (bits(after) != bits(before)).int()
        none = torch.zeros(len(self.indices), dtype=torch.int32, device=differ.device)
        return none.scatter_reduce_(0, self.owner, differ, "amax")


def can_be_packed(buffer: Tensor) -> bool:
    """Tell whether a buffer is a plain run of numbers that torch can compute with."""
    return (
        buffer.layout is torch.strided
        and not (buffer.is_quantized or buffer.is_conj() or buffer.is_neg())
        and (buffer.itemsize > 1 or not buffer.is_floating_point())
        and 0 not in buffer.stride()
    )


def packs_of(buffers: Tensors) -> list[Pack]:
    """Lay out all buffers that are there."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, buffer in enumerate(buffers):
        if buffer is not None:
            kinds.setdefault((buffer.device, buffer.dtype), []).append(index)
    return [
        Pack.of(indices, [buffer for index in indices if (buffer := buffers[index]) is not None])
        for indices in kinds.values()
    ]


@dataclass(slots=True)
class DeferredBufferSum:
    """What the shards of one place made of the buffers, pack by pack.

    Attributes:
        packs: Where the buffers lie.
        starts: The buffers before the shards.
        packed: Their numbers.
        means: Sums of weight times value, in the tree's order.
        weights: For each buffer of a pack, the weights of the shards that changed it, in float64; None before
            the first shard.
        firsts: What the first shard that changed a buffer made of it; anything where its weight is 0.
    """

    packs: Sequence[Pack]
    starts: Tensors
    packed: list[Tensor]
    means: ShardSum
    weights: Tensors
    firsts: Tensors

    @classmethod
    def begun(cls, first: int, starts: Tensors, packs: Sequence[Pack]) -> DeferredBufferSum:
        """Begin with no shard; the first to come has this number."""
        none: Tensors = [None] * len(packs)
        return cls(packs, starts, [pack.pack(starts) for pack in packs], ShardSum(first), none, none.copy())

    def add(self, shard: int, values: Tensors, starts: Tensors, weight: float, *, mean: bool) -> list[bool]:
        """Add what a shard made of the buffers, as `BufferSum.add` does.

        Returns:
            For each buffer, whether the shard may have changed it: always.
        """
        shares: Tensors = [None] * len(self.packs)
        there = [start if value is None else value for value, start in zip(values, starts, strict=True)]
        for index, pack in enumerate(self.packs):
            numbers = pack.pack(there)
            changed = pack.changed(self.packed[index], numbers)
            if mean and pack.averaged:
                shares[index] = torch.where(changed[pack.owner] > 0, numbers * weight, -0.0)
            else:
                self._keep_first(index, numbers)
            share, before = changed.double() * weight, self.weights[index]
            self.weights[index] = share if before is None else before + share
        self.means.push(shard, shares)
        return [True] * len(values)

    def _keep_first(self, index: int, numbers: Tensor) -> None:
        kept, weights = self.firsts[index], self.weights[index]
        if kept is not None and weights is not None:
            numbers = torch.where(weights[self.packs[index].owner] > 0, kept, numbers)
        self.firsts[index] = numbers

    def read(self) -> BufferSum:
        """Give the same buffer by buffer, without what no shard changed; waits for the device once."""
        known = BufferSum.begun(self.means.first, len(self.starts))
        there = [weights for weights in self.weights if weights is not None]
        if not there:
            return known
        order = [index for pack in self.packs for index in pack.indices]
        for index, weight in zip(order, torch.cat(there).tolist(), strict=True):
            known.weights[index] = weight
        for partial in self.means.partials:
            taken = self._taken_apart(partial.tensors, known.weights)
            known.means.partials.append(PartialSum(partial.shard, taken))
        firsts = self._taken_apart(self.firsts, known.weights)
        known.firsts = [
            None if first is None or start is None else like(first, start)
            for first, start in zip(firsts, self.starts, strict=True)
        ]
        return known

    def _taken_apart(self, packed: Tensors, weights: Sequence[float]) -> Tensors:
        found: Tensors = [None] * len(self.starts)
        for pack, numbers in zip(self.packs, packed, strict=True):
            if numbers is not None:
                for index, part in zip(pack.indices, pack.parts(numbers), strict=True):
                    found[index] = part if weights[index] else None
        return found


def combine_packed(
    sums: Sequence[DeferredBufferSum], slots: Sequence[BufferRef], *, weight: float, unless: Tensor | None
) -> None:
    """Make what all shards made of the buffers the model's new buffers; see `combine`."""
    buffers: Tensors = [slot.get() for slot in slots]
    packs = sums[0].packs
    homes = [pack.chosen(buffers)[0].device for pack in packs]
    means = total(
        [
            PartialSum(partial.shard, _all_sent(partial.tensors, homes))
            for place in sums
            for partial in place.means.partials
        ]
    )
    weights = [_all_sent(place.weights, homes) for place in sums]
    firsts = [_all_sent(place.firsts, homes) for place in sums]
    for index, (pack, mean) in enumerate(zip(packs, means, strict=True)):
        owner, before = sent(pack.owner, homes[index]), pack.pack(buffers)
        owned = [share[owner] for each in weights if (share := each[index]) is not None]
        changed = torch.stack(owned).sum(0)
        if mean is None:
            value = _first(owned, [first for each in firsts if (first := each[index]) is not None])
        else:
            value = _mean(before, mean, weight, changed)
        keeps = changed == 0 if unless is None else (changed == 0) | (sent(unless, owner.device) > 0)
        targets = pack.chosen(buffers)
        parts = pack.parts(torch.where(keeps, before, value))
        torch._foreach_copy_(targets, list(map(like, parts, targets)))


def _mean(before: Tensor, total: Tensor, weight: float, changed: Tensor) -> Tensor:
    """Divide once, after shards that left a buffer alone were added with its old value."""
    absent = weight - changed
    # As torch multiplies by a number of the host: halves in float32, rounded once.
    wide = before.float() if before.itemsize < torch.float32.itemsize else before
    mixed = total + (wide * absent.to(wide.dtype)).to(before.dtype)
    return torch.where(absent == 0, total, mixed) / weight


def _first(weights: Sequence[Tensor], firsts: Sequence[Tensor]) -> Tensor:
    """Choose, number by number, what the first place with any weight has."""
    chosen = firsts[-1]
    for weight, first in zip(reversed(weights[:-1]), reversed(firsts[:-1]), strict=True):
        chosen = torch.where(weight > 0, first, chosen)
    return chosen


def _all_sent(tensors: Tensors, devices: Sequence[torch.device]) -> Tensors:
    return [None if tensor is None else sent(tensor, device) for tensor, device in zip(tensors, devices, strict=True)]
