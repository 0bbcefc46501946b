"""Give every shard the same buffers to start from, and combine what the shards made of them.

Buffers (running statistics, counters) are state like weights: every shard starts from those of the last
update, none sees another's, and the new ones become state only when the update is applied. The rule:

* ``"mean"``: a floating-point or complex buffer becomes the mean over shards, each weighted by its
  number of samples; a shard that left it alone counts with the old value. Every other buffer (a counter)
  becomes what the first shard that changed it made of it: set once, never summed.
* ``"first"``: every buffer becomes what the first shard that changed it made of it.

A buffer that is None is so at the start of every shard; what a shard puts there is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from lockstep.precision import sent
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

    def put(self, tensor: torch.Tensor | None) -> None:
        """Put a tensor there, or none."""
        self.module._buffers[self.name] = tensor


def buffer_slots(model: nn.Module) -> list[Slot]:
    """List a model's buffers, each tensor once, in an order that its copies share."""
    slots: dict[int, Slot] = {}
    for slot in _all_slots(model):
        buffer = slot.get()
        if buffer is not None:
            slots.setdefault(id(buffer), slot)
    return list(slots.values())


def _all_slots(model: nn.Module) -> list[Slot]:
    """List every name under which a module keeps a buffer, or none as yet."""
    return [Slot(module, name) for module in model.modules() for name in module._buffers]


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

    Whether a shard changed a buffer is told by its values. Version counters would not do: batch
    normalisation writes its running statistics past them, and so does whoever writes to ``buffer.data``.

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
        self._bound = [(slot, slot.get()) for slot in _all_slots(replica)]
        self._start: Tensors = []
        self._clean = [False] * len(self._slots)

    def __len__(self) -> int:
        """Count the names under which a buffer may be put, those without one included."""
        return len(self._bound)

    def begin(self, first: int) -> BufferSum:
        """Begin a run of shards, the first with this number; the original's buffers stand still during it."""
        size = len(self._slots)
        self._start = [
            None if own is None or (source := slot.get()) is None else source.detach().to(own.device)
            for slot, own in zip(self._sources, self._own, strict=True)
        ]
        self._clean = [False] * size
        return BufferSum(ShardSum(first), [0.0] * size, [None] * size)

    def restore(self) -> None:
        """Put the replica's buffers back to those of the original, writing only where that may be needed."""
        for slot, own in self._bound:
            if slot.get() is not own:
                slot.put(own)
        stale = [
            (own, start)
            for own, start, clean in zip(self._own, self._start, self._clean, strict=True)
            if own is not None and start is not None and not clean
        ]
        if stale:
            owns, starts = zip(*stale, strict=True)
            torch._foreach_copy_(owns, starts)
        # Until `take` has looked: the shard may fail on the way.
        self._clean = [False] * len(self._slots)

    def renew(self) -> None:
        """Do what `restore` does with tensors that are new, because graphs refer to those of earlier shards.

        A graph that is kept for a later backward may have saved a buffer. Written in place, the buffer would
        make that backward fail, or wrong where a kernel writes past the version counter.
        """
        fresh = {
            id(own): start.clone()
            for own, start in zip(self._own, self._start, strict=True)
            if own is not None and start is not None
        }
        for slot, own in self._bound:
            slot.put(fresh.get(id(own), own))

    def take(self, shard: int, weight: float, into: BufferSum) -> None:
        """Add what a shard made of the buffers.

        Args:
            shard: The shard's number, ascending.
            weight: Its share among the shards; a product with it must be exact in float64.
            into: The sums of this place, changed in place.

        Raises:
            ValueError: The shard gave a buffer another shape.
        """
        values: Tensors = [None] * len(self._slots)
        for index, changed in enumerate(self._changed()):
            value = self._slots[index].get()
            self._clean[index] = not changed and value is self._own[index]
            if value is None or not changed:
                continue
            if self._rule == "mean" and (value.is_floating_point() or value.is_complex()):
                values[index] = value.detach() * weight
                into.weights[index] += weight
            elif into.firsts[index] is None:
                into.firsts[index] = value.detach().clone()
        into.means.push(shard, values)

    def _changed(self) -> list[bool]:
        """Tell for each buffer whether the shard changed it."""
        pairs = []
        for slot, start in zip(self._slots, self._start, strict=True):
            value = slot.get()
            if value is not None and start is not None and value.shape != start.shape:
                raise ValueError(
                    f"`model` must keep the shapes of its buffers, got {tuple(value.shape)} for "
                    f"{slot.name!r} of a {type(slot.module).__name__}, which was {tuple(start.shape)}. "
                    "Keep what has no fixed shape in a plain attribute."
                )
            pairs.append((value, start))
        return _differ(pairs)


def _differ(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> list[bool]:
    """Tell for each pair whether it differs, waiting for the device once; where one is absent it does not."""
    flags = [
        False
        if value is None or start is None
        else not torch.equal(value, start)
        if value.device.type == "cpu" and value.dtype == start.dtype
        else (value != start).any()
        for value, start in pairs
    ]
    waiting = [flag for flag in flags if isinstance(flag, torch.Tensor)]
    answers = iter(torch.stack(waiting).tolist() if waiting else [])
    return [next(answers) if isinstance(flag, torch.Tensor) else flag for flag in flags]


def combine(
    sums: Sequence[BufferSum], slots: Sequence[Slot], *, weight: float, unless: torch.Tensor | None = None
) -> None:
    """Make what all shards made of the buffers the model's new buffers.

    Args:
        sums: One for each place, in order of shards.
        slots: The model's buffers, which are written in place, each on its own device.
        weight: The weight of all shards together.
        unless: 0-d, on a device; above 0 where the buffers are to stay as they are.

    Determinism: the bits depend on the shards alone; sums follow the tree, one division follows.
    """
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
            _become(target, (mean if absent == 0 else mean + target * absent) / weight, unless)
        elif firsts and firsts[0] is not None:
            _become(target, firsts[0], unless)


def _become(target: torch.Tensor, value: torch.Tensor, unless: torch.Tensor | None) -> None:
    """Write a buffer's new value, unless a flag on a device is up."""
    if unless is not None:
        value = torch.where(sent(unless, target.device) > 0, target, sent(value, target.device))
    target.copy_(value)


def _move(tensor: torch.Tensor | None, slot: Slot) -> torch.Tensor | None:
    """Bring a sum to where the buffer it is for lives."""
    target = slot.get()
    return None if tensor is None or target is None else tensor.to(target.device)
