"""Give every shard the same buffers to start from, and combine what the shards made of them.

Buffers (running statistics, counters) are state like weights: every shard starts from those of the last
update, none sees another's, and the new ones become state only when the update is applied. The rule:

* ``"mean"``: a floating-point or complex buffer becomes the mean over shards, each weighted by its
  number of samples; a shard that left it alone counts with the old value. Every other buffer (a counter)
  becomes what the first shard that changed it made of it: set once, never summed.
* ``"first"``: every buffer becomes what the first shard that changed it made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from lockstep.tree import PartialSum, ShardSum, Tensors, total

BufferRule: TypeAlias = Literal["mean", "first"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module keeps a buffer; a forward may put another tensor there."""

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor | None:
        """Give the tensor that is there now."""
        return self.module._buffers[self.name]

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there."""
        self.module._buffers[self.name] = tensor


def buffer_slots(model: nn.Module) -> list[Slot]:
    """List a model's buffers, each tensor once, in an order that its copies share."""
    seen: set[int] = set()
    slots = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                slots.append(Slot(module, name))
    return slots


@dataclass(slots=True)
class BufferSum:
    """What the shards of one place made of the buffers.

    Attributes:
        means: Sums of weight times value, in the tree's order.
        weights: For each buffer, the weights of the shards that changed it.
        firsts: For each buffer, what the first shard that changed it made of it.
    """

    means: ShardSum
    weights: list[float]
    firsts: Tensors


class ReplicaBuffers:
    """The buffers of one replica: put back before a shard, taken after it.

    Args:
        original: The model whose buffers are the state; only read.
        replica: A copy of it.
        rule: How shards are combined; see the head of this module.
    """

    def __init__(self, original: nn.Module, replica: nn.Module, rule: BufferRule) -> None:
        self._rule = rule
        self._sources = buffer_slots(original)
        self._slots = buffer_slots(replica)
        self._own = [slot.get() for slot in self._slots]
        self._versions = [0] * len(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def begin(self, first: int) -> BufferSum:
        """Begin a run of shards, the first with this number."""
        size = len(self._slots)
        return BufferSum(ShardSum(first), [0.0] * size, [None] * size)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the replica's buffers back to those of the original.

        All of them, every time: kernels such as batch norm's write running statistics without counting
        up the tensor's version, so nothing cheaper than the values tells whether a shard wrote.
        """
        owns, sources = [], []
        for slot, own, origin in zip(self._slots, self._own, self._sources, strict=True):
            source = origin.get()
            if own is None or source is None:
                continue
            if slot.get() is not own:
                slot.put(own)
            owns.append(own)
            sources.append(source)
        if owns:
            torch._foreach_copy_(owns, sources)
        self._versions = [0 if own is None else own._version for own in self._own]

    @torch.no_grad()
    def take(self, shard: int, weight: float, into: BufferSum) -> None:
        """Add what a shard made of the buffers.

        Args:
            shard: The shard's number, ascending.
            weight: Its share among the shards; a product with it must be exact in float64.
            into: The sums of this place, changed in place.
        """
        values: Tensors = [None] * len(self._slots)
        for index, (slot, own) in enumerate(zip(self._slots, self._own, strict=True)):
            value = slot.get()
            if value is None or own is None or not self._changed(index, value):
                continue
            if self._rule == "mean" and (value.is_floating_point() or value.is_complex()):
                values[index] = value * weight
                into.weights[index] += weight
            elif into.firsts[index] is None:
                into.firsts[index] = value.detach().clone()
        into.means.push(shard, values)

    def _changed(self, index: int, value: torch.Tensor) -> bool:
        """Tell whether a shard wrote to a buffer: counted by its version, or seen in its values."""
        if value is not self._own[index] or value._version != self._versions[index]:
            return True
        source = self._sources[index].get()
        return source is None or not torch.equal(value, source.to(value.device))


@torch.no_grad()
def combine(sums: Sequence[BufferSum], model: nn.Module, *, weight: float) -> None:
    """Make what all shards made of the buffers the model's new buffers.

    Args:
        sums: One for each place, in order of shards.
        model: The buffers are written in place, each on its own device.
        weight: The weight of all shards together.

    Determinism: the bits depend on the shards alone; sums follow the tree, one division follows.
    """
    slots = buffer_slots(model)
    partials = [
        PartialSum(
            partial.shard, [_move(tensor, slot) for tensor, slot in zip(partial.tensors, slots, strict=True)]
        )
        for place in sums
        for partial in place.means.partials
    ]
    means = total(partials)
    for index, slot in enumerate(slots):
        target = slot.get()
        mean = means[index]
        firsts = [place.firsts[index] for place in sums if place.firsts[index] is not None]
        if target is None:
            continue
        if mean is not None:
            absent = weight - sum(place.weights[index] for place in sums)
            target.copy_((mean if absent == 0 else mean + target * absent) / weight)
        elif firsts and firsts[0] is not None:
            target.copy_(firsts[0])


def _move(tensor: torch.Tensor | None, slot: Slot) -> torch.Tensor | None:
    """Bring a sum to where the buffer it is for lives."""
    target = slot.get()
    return None if tensor is None or target is None else tensor.to(target.device)
