"""Give every shard the same buffers to start from, and take what it made of them.

Buffers (running statistics, counters) are state like weights: every shard starts from those of the last
update, none sees another's, and the new ones become state only when the update is applied. The rule:

* ``"mean"``: a floating-point or complex buffer becomes the mean over shards, each weighted by its
  number of samples; a shard that left it alone counts with the old value. Every other buffer (a counter)
  becomes what the first shard that changed it made of it: set once, never summed.
* ``"first"``: every buffer becomes what the first shard that changed it made of it.

A buffer that is None is so at the start of every shard; what a shard puts there is dropped. A tensor of
another format or on another device, put where a buffer was, is brought to those of the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.precision import sent
from lockstep.replicas.buffers.buffer_refs import BufferRef, all_buffer_refs, buffer_refs
from lockstep.replicas.buffers.buffer_sums import BufferSum, combine_known
from lockstep.replicas.buffers.deferred_sums import DeferredBufferSum, Pack, can_be_packed, combine_packed, packs_of
from lockstep.tree import ShardSum, Tensors

BufferRule: TypeAlias = Literal["mean", "first"]

AnyBufferSum: TypeAlias = BufferSum | DeferredBufferSum


class ReplicaBuffers:
    """The buffers of one replica: put back before a shard, taken after it.

    Whether a shard changed a buffer is told by its bits. Version counters would not do: batch
    normalisation writes its running statistics past them, and so does whoever writes to ``buffer.data``.

    Args:
        original: The model whose buffers are the state; only read.
        replica: A copy of it.
        rule: How shards are combined; see the head of this module.
    """

    def __init__(self, original: nn.Module, replica: nn.Module, rule: BufferRule) -> None:
        self._rule = rule
        self._sources = buffer_refs(original)
        self._slots = buffer_refs(replica)
        self._own = [slot.get() for slot in self._slots]
        self.bound = [(slot, slot.get()) for slot in all_buffer_refs(replica)]
        """The names under which a buffer may be put, those without one included; empty for a model without any."""
        self._start: Tensors = []
        self._clean = [False] * len(self._slots)
        self._packed: list[Pack] = []
        self._packed_kinds: Sequence[object] = []

    def begin(self, first: int, *, unread: bool = False) -> AnyBufferSum:
        """Begin a run of shards, during which the original's buffers stand still.

        Args:
            first: The number of the first shard.
            unread: Whether nobody on the host is to learn which buffers a shard changed, not even on a CPU.
                Of a model on another device nobody learns it anyway, unless a buffer is `unpackable`.
        """
        if not self.bound:
            return BufferSum(ShardSum(first), [], [])
        self._start = [
            None if own is None or (source := slot.get()) is None else source.detach().to(own.device)
            for slot, own in zip(self._sources, self._own, strict=True)
        ]
        self._clean = [False] * len(self._slots)
        sources = [source for slot in self._sources if (source := slot.get()) is not None]
        # The same answer at every place, for it is the original that is asked.
        unread = unread or any(source.device.type != "cpu" for source in sources)
        if unread and all(map(can_be_packed, sources)):
            return DeferredBufferSum.begun(first, self._start, self._packs())
        return BufferSum.begun(first, len(self._slots))

    def _packs(self) -> list[Pack]:
        """Say where the buffers lie in packs; the answer is kept while their formats are the same."""
        kinds = [None if start is None else (start.shape, start.dtype, start.device) for start in self._start]
        if kinds != self._packed_kinds:
            self._packed_kinds, self._packed = kinds, packs_of(self._start)
        return self._packed

    def restore(self) -> None:
        """Put the replica's buffers back to those of the original, writing only where that may be needed."""
        for slot, own in self.bound:
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

    def renew(self, trained: Sequence[int] = ()) -> list[torch.Tensor]:
        """Do what `restore` does with tensors that are new, because graphs refer to those of earlier shards.

        A graph that is kept for a later backward may have saved a buffer. Written in place, the buffer would
        make that backward fail, or wrong where a kernel writes past the version counter.

        Args:
            trained: The numbers of the buffers that require a gradient.

        Returns:
            For each of these, the leaf in which a backward leaves it.
        """
        fresh = {
            id(own): start.clone()
            for own, start in zip(self._own, self._start, strict=True)
            if own is not None and start is not None
        }
        leaves = [fresh[id(self._own[index])].requires_grad_() for index in trained]
        for index, leaf in zip(trained, leaves, strict=True):
            source = self._sources[index].get()
            if source is not None and not source.is_leaf:
                # Forward may write to it as it may to the original.
                fresh[id(self._own[index])] = leaf.clone()
        for slot, own in self.bound:
            slot.put(fresh.get(id(own), own))
        return leaves

    def take(self, shard: int, weight: float, into: AnyBufferSum) -> None:
        """Add what a shard made of the buffers.

        Args:
            shard: The shard's number, ascending.
            weight: Its share among the shards; a product with it must be exact in float64.
            into: The sums of this place, changed in place.

        Raises:
            ValueError: The shard gave a buffer another shape.
        """
        left = [slot.get() for slot in self._slots]
        values: Tensors = [
            None if value is None or start is None else _brought(value, slot, start)
            for value, slot, start in zip(left, self._slots, self._start, strict=True)
        ]
        changed = into.add(shard, values, self._start, weight, mean=self._rule == "mean")
        self._clean = [
            not may_differ and value is own for may_differ, value, own in zip(changed, left, self._own, strict=True)
        ]


def unpackable(model: nn.Module) -> str | None:
    """Return the name of a buffer that the host has to look at after every shard; None if there is none."""
    for slot in buffer_refs(model):
        buffer = slot.get()
        if buffer is not None and not is_lazy(buffer) and not can_be_packed(buffer):
            return slot.name
    return None


def combine(
    sums: Sequence[AnyBufferSum],
    slots: Sequence[BufferRef],
    *,
    weight: float,
    unless: torch.Tensor | None = None,
) -> None:
    """Make what all shards made of the buffers the model's new buffers; nothing waits for a device.

    Args:
        sums: One for each place, in order of shards, all of one kind; what they hold is changed in place.
        slots: The model's buffers, which are written in place, each on its own device.
        weight: The weight of all shards together.
        unless: 0-d, on a device; above 0 where the buffers are to stay as they are.

    Determinism: the bits depend on the shards alone; sums follow the tree, one division follows.
    """
    packed = [each for each in sums if isinstance(each, DeferredBufferSum)]
    if packed:
        combine_packed(packed, slots, weight=weight, unless=unless)
        return
    known = [each for each in sums if isinstance(each, BufferSum)]
    combine_known(known, slots, weight=weight, unless=unless)


def _brought(value: torch.Tensor, slot: BufferRef, start: torch.Tensor) -> torch.Tensor:
    """Bring what a shard left where a buffer was to the buffer's device and format.

    Raises:
        ValueError: It has another shape.
    """
    if value.shape != start.shape:
        raise ValueError(
            f"`model` must keep the shapes of its buffers, got {tuple(value.shape)} for "
            f"{slot.name!r} of a {type(slot.module).__name__}, which was {tuple(start.shape)}. "
            "Keep what has no fixed shape in a plain attribute."
        )
    return sent(value.detach(), start.device).to(start.dtype)
