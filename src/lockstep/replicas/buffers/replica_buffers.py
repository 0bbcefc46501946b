"""Start every shard from the same buffers, and collect the changes that it makes.

Buffers (running statistics, counters) are state, like weights. Every shard starts from those of the last update and
sees no changes of other shards, and the combined buffers become state only when the update is applied. There are five
rules. In all of them, one shard alone leaves what a plain forward leaves.

* ``"mean"``: a floating-point or complex buffer becomes the mean over shards, weighted by their numbers of samples,
  where a shard that left it unchanged counts with the old value. Any other buffer (such as a counter) becomes the value
  that the shards changed it to: it is set once and never summed. Shards that differ in it are refused.
* ``"sum"``: the changes of all shards are added to the old value, as for a buffer that counts samples.
* ``"min"``, ``"max"``: every number becomes the smallest or the largest one of the shards that changed the buffer.
* ``"first"``: every buffer becomes the value from the first shard that changed it.

A buffer that is None is None at the start of every shard, and a tensor that a shard assigns to it is dropped. A tensor
of another dtype or on another device that a shard assigns to a buffer is converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, few, warn
from lockstep.precision import to_device
from lockstep.replicas.buffers.buffer_refs import BufferRef, BufferRules, all_buffer_refs, buffer_refs
from lockstep.replicas.buffers.buffer_sums import BufferSum, Pack, as_real, can_be_packed, create_packs, is_averaged
from lockstep.tree import ShardSum, Tensors

RUNNING_STATISTICS: Final = ("running_mean", "running_var")
"""The names that the layers of PyTorch give to averages over batches."""

MOST_DROPPED: Final = 16
"""The number of values at most that are compared because shards have assigned them to buffers that are None."""

DIFFERING: Final = "shards leave different values there"


class ReplicaBuffers:
    """The buffers of one replica, which are restored before each shard and collected after it.

    Whether a shard changed a buffer is decided by its bits. Version counters are not sufficient, because batch
    normalization writes its running statistics without incrementing them, and so does a write to ``buffer.data``.

    Args:
        original: The model whose buffers are the state. They are only read.
        replica: A copy of the model.
        rules: The rules by which shards are combined, as described in the docstring of this module.
    """

    def __init__(self, original: nn.Module, replica: nn.Module, rules: BufferRules) -> None:
        self._sources = buffer_refs(original, rules)
        self._given_rules = rules
        self._rules = [ref.rule for ref in self._sources]
        self._refs = buffer_refs(replica)
        self._own = [own for ref in self._refs if (own := ref.get()) is not None]
        self.entries = [(ref, ref.get()) for ref in all_buffer_refs(replica)]
        """All names of buffers and their tensors, including None; empty if the model has no buffers at all."""
        self._start: list[torch.Tensor] = []
        self.compared: dict[str, set[int]] | None = None
        """Takes the checksums of what shards leave, see `note_left`; None if they are not compared."""
        self._unchanged = [False] * len(self._refs)
        self._dropped: list[tuple[str, torch.Size, int]] = []
        """What shards have assigned to buffers that are None: names, shapes and checksums."""
        self._packed: list[Pack] = []
        self._packed_kinds: Sequence[object] = []

    def start_shards(self, first: int, *, deferred: bool = False, compares: bool = False) -> BufferSum:
        """Prepare for a run of shards, during which the buffers of the original do not change.

        Args:
            first: The number of the first shard.
            deferred: Whether the host must not learn which buffers a shard changed, not even on a CPU. For a model on
                another device it never does, unless there is an `unpackable_buffer`.
            compares: Whether shards are compared even so, for `check_buffers`.

        Returns:
            An empty sum to collect the changes in.
        """
        if not self.entries:
            return BufferSum(ShardSum(first))
        sources = [source for ref in self._sources if (source := ref.get()) is not None]
        self._start = [
            source if source.device == own.device and not source.requires_grad else source.detach().to(own.device)
            for source, own in zip(sources, self._own, strict=True)
        ]
        self._unchanged = [False] * len(self._refs)
        # Decided by the original, so that all devices of all ranks use the same packs.
        deferred = deferred or any(source.device.type != "cpu" for source in sources)
        together = deferred and all(map(can_be_packed, sources))
        return BufferSum.empty(first, self._start, self._packs(together=together), compares=compares or not together)

    def _packs(self, *, together: bool) -> list[Pack]:
        """Return the packs of the buffers, which are created again only if their formats have changed."""
        kinds = [together, *((start.shape, start.dtype, start.device) for start in self._start)]
        if kinds != self._packed_kinds:
            self._packed_kinds, self._packed = kinds, create_packs(self._start, self._rules, together=together)
        return self._packed

    def restore(self) -> None:
        """Reset the buffers of the replica to those of the original, writing only buffers that may have changed."""
        for ref, own in self.entries:
            if ref.get() is not own:
                if own is None:
                    self._note_dropped(ref)
                ref.set(own)
        # Writing only stale buffers saves kernels, and keeps the version counters of the others.
        stale = [
            # A forward may have called `requires_grad_()` on a buffer, as torch allows.
            (own.detach() if own.requires_grad else own, start)
            for own, start, unchanged in zip(self._own, self._start, self._unchanged, strict=True)
            if not unchanged
        ]
        # With several dtypes in one call, CUDA would copy one buffer after another.
        for dtype in dict.fromkeys(start.dtype for _, start in stale):
            alike = [pair for pair in stale if pair[1].dtype == dtype]
            torch._foreach_copy_([own for own, _ in alike], [start for _, start in alike])
        # A shard that fails never gets to `collect`, so its buffers count as changed until then.
        self._unchanged = [False] * len(self._refs)

    def _note_dropped(self, ref: BufferRef) -> None:
        """Warn if shards assign different values to a buffer that is None, which is no cache of what all know then."""
        value = ref.get()
        if len(self._dropped) >= MOST_DROPPED or type(value) is not torch.Tensor or not value.is_floating_point():
            return
        same = [each for path, shape, each in self._dropped if path == ref.path and shape == value.shape]
        self._dropped.append((ref.path, value.shape, checksum(value)))
        if same and same[-1] != self._dropped[-1][-1]:
            self._dropped += [self._dropped[-1]] * MOST_DROPPED
            warn(
                f"The model's buffer {ref.path!r} is None, and shards assign different values to it. They are dropped, "
                "because every shard begins with None. If the model remembers something there, register a value of its "
                "final shape, such as zeros, and another buffer that says whether it has been set.",
                DeterminismWarning,
            )

    def restore_as_new(self, trained: Sequence[int] = ()) -> list[torch.Tensor]:
        """Reset the buffers like `restore`, but to new tensors, because graphs of earlier shards refer to the old ones.

        A graph that is kept for a later backward may have saved a buffer. Writing to it in place would make that
        backward fail, or give wrong results if a kernel writes without incrementing the version counter.

        Args:
            trained: The indices of the buffers that require a gradient.

        Returns:
            For each of these the leaf tensor in which a backward stores its gradient.
        """
        fresh = {id(own): start.clone() for own, start in zip(self._own, self._start, strict=True)}
        leaves = [fresh[id(self._own[index])].requires_grad_() for index in trained]
        for index, leaf in zip(trained, leaves, strict=True):
            source = self._sources[index].get()
            if source is not None and not source.is_leaf:
                # Forward may write in place to a non-leaf tensor, as it may to the original, but not to a leaf.
                fresh[id(self._own[index])] = leaf.clone()
        for ref, own in self.entries:
            if own is None:
                self._note_dropped(ref)
            ref.set(fresh.get(id(own), own))
        return leaves

    def left(self) -> Tensors:
        """Return the tensors that the last shard has left, in the order of `buffer_refs`."""
        return [ref.get() for ref in self._refs]

    def collect(self, shard: int, weight: float, into: BufferSum, *, alone: bool = False) -> None:
        """Add the buffers after one shard to a sum.

        Args:
            shard: The number of the shard, in ascending order.
            weight: The weight of the shard. A product with it must be exact in float64.
            into: The sum of this device, which is changed in place.
            alone: Whether the update has no other shard.

        Raises:
            ValueError: If the shard assigned a tensor of another shape to a buffer, or left another value than an
                earlier one in a buffer that has no mean.
        """
        left = [ref.get() for ref in self._refs]
        if self.compared is not None:
            note_left(self.compared, self._sources, left, self._given_rules)
        values: Tensors = [
            None if value is None else _in_format_of(value, ref, start)
            for value, ref, start in zip(left, self._refs, self._start, strict=True)
        ]
        changed = into.add(shard, values, weight, alone=alone)
        if into.is_known and any(into.differing):
            raise rule_error(self._sources[list(map(bool, into.differing)).index(True)], DIFFERING)
        self._unchanged = [
            not may_differ and value is own for may_differ, value, own in zip(changed, left, self._own, strict=True)
        ]


def unpackable_buffer(model: nn.Module) -> str | None:
    """Return the name of a buffer that the host has to check after every shard, or None if there is none.

    Args:
        model: The model.
    """
    for ref in buffer_refs(model):
        buffer = ref.get()
        if buffer is not None and not is_lazy(buffer) and not can_be_packed(buffer):
            return ref.name
    return None


def check_buffers(sums: Sequence[BufferSum], refs: Sequence[BufferRef], sizes: Sequence[int] = ()) -> None:
    """Check that the rules of buffers fit what shards have changed.

    Args:
        sums: One sum per device, in order of shards. Nothing is read from another device than a CPU without `sizes`.
        refs: The buffers of the model.
        sizes: The number of samples of each shard, to find buffers that count samples as well.

    Raises:
        ValueError: If shards changed a buffer that has no mean to different values, or one that shares memory with
            another, or if the mean of a buffer would count the samples of one shard.
    """
    known = [each.resolve() for each in sums if sizes or each.is_known]
    if sizes:
        _check_apart(refs, [sum(each.weights[index] for each in known) > 0 for index in range(len(refs))])
    differing = {index for each in known for index, flag in enumerate(each.differing) if flag}
    for index, ref in enumerate(refs if len(known) > 1 else ()):
        found = [first.cpu() for each in known if (first := each.firsts[index]) is not None]
        if ref.rule == "mean" and not all(torch.equal(each, found[0]) for each in found):
            differing.add(index)
    if differing:
        raise rule_error(refs[min(differing)], DIFFERING)
    # Shards of one sample count it as they would count a step.
    for index, ref in enumerate(refs if any(size > 1 for size in sizes) else ()):
        start, weight = ref.get(), sum(each.weights[index] for each in known)
        partials = [part.tensors[index] for each in known for part in each.weighted_sums.partials]
        if start is None or ref.rule != "mean" or not is_averaged(start) or weight != sum(sizes):
            continue
        expected = as_real(start) * weight + sum(size * size for size in sizes)
        added = torch.stack([part.to(start.device) for part in partials if part is not None]).sum(0)
        # A few roundings off, where the buffer does not begin with an integer.
        if expected.itemsize >= torch.float32.itemsize and torch.allclose(added, expected, rtol=1e-6, atol=0):
            raise rule_error(ref, "every shard adds its number of samples to it")


def _check_apart(refs: Sequence[BufferRef], changed: Sequence[bool]) -> None:
    """Check that no buffer that a shard has changed shares memory with another, because each is stored on its own.

    Args:
        refs: The buffers of the model.
        changed: Whether a shard has changed each of them.

    Raises:
        ValueError: If one does.
    """
    places = []
    for index, ref in enumerate(refs):
        buffer = ref.get()
        if buffer is not None and buffer.layout is torch.strided and buffer.is_contiguous() and buffer.nbytes:
            places.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, index))
    places.sort()
    for (_, end, one), (start, _, other) in pairwise(places):
        if start < end and (changed[one] or changed[other]):
            raise ValueError(
                "`model` must hold no buffers that share memory and that a forward changes, got "
                f"{refs[one].path!r} and {refs[other].path!r}. Register one of them, and take the other from it in "
                "forward."
            )


def _is_averaged_silently(ref: BufferRef, buffer: torch.Tensor, rules: BufferRules) -> bool:
    """Return whether a buffer is averaged over shards without a rule that you have given.

    Args:
        ref: The buffer.
        buffer: Its tensor.
        rules: The rules that were given.
    """
    if ref.rule != "mean" or ref.name in RUNNING_STATISTICS or not is_averaged(buffer):
        return False
    return not (isinstance(rules, Mapping) and any(fnmatchcase(ref.path, pattern) for pattern in rules))


def note_left(
    into: dict[str, set[int]], refs: Sequence[BufferRef], left: Sequence[torch.Tensor | None], rules: BufferRules
) -> None:
    """Keep the checksums of averaged buffers without a rule, in which shards may leave different values.

    Args:
        into: The checksums by the names of buffers, which is changed in place.
        refs: The buffers of the model.
        left: What a shard has left in each of them; None where there is nothing to compare.
        rules: The rules that were given.
    """
    for ref, tensor in zip(refs, left, strict=True):
        if tensor is not None and _is_averaged_silently(ref, tensor, rules):
            into.setdefault(ref.path, set()).add(checksum(tensor))


def warn_of_means(left: Mapping[str, set[int]]) -> None:
    """Warn of averaged buffers that shards leave different values in.

    Args:
        left: The checksums of what shards have left, by the names of buffers.
    """
    names = [name for name, found in left.items() if len(found) > 1]
    if names:
        warn(
            f"The shards leave different values in the buffer {few([*map(repr, names)], 1)}, which `buffers` does not "
            "name: the model gets their mean, weighted by samples. That is right for averages, and wrong for sums, "
            f'extremes and counts. Say which it is, by buffers={{{names[0]!r}: "mean"}}, "sum" for one to which '
            'every shard adds, "min", "max" or "first".',
            DeterminismWarning,
        )


def rule_error(ref: BufferRef, reason: str) -> ValueError:
    """Return the error for a buffer whose rule does not fit.

    Args:
        ref: The buffer.
        reason: What shards do with it.
    """
    return ValueError(
        f"`buffers` must say how the shards' values of {ref.path!r} are combined, got {ref.rule!r}, but {reason}. Pass "
        f'buffers={{{ref.path!r}: "sum"}} to add up the changes of all shards, or "min", "max" or "first" for the '
        "smallest or largest value or that of the first shard."
    )


def _in_format_of(value: torch.Tensor, ref: BufferRef, start: torch.Tensor) -> torch.Tensor:
    """Convert the tensor that a shard left in a buffer to the device and dtype of the buffer.

    Args:
        value: The tensor.
        ref: The buffer, for error messages.
        start: The buffer before the shard.

    Raises:
        ValueError: If the tensor has another shape.
    """
    if value.shape != start.shape:
        raise ValueError(
            f"`model` must keep the shapes of its buffers, got {tuple(value.shape)} for "
            f"{ref.name!r} of a {type(ref.module).__name__}, which was {tuple(start.shape)}. "
            "If the first forward gives it its shape, as in observers of torch.ao, run the model on a batch in "
            "training mode under torch.no_grad() before you create the updater. Store a tensor without a fixed shape "
            "in a plain attribute."
        )
    # The usual case, in fewer calls for each of what may be hundreds of buffers.
    if value.dtype == start.dtype and value.device == start.device and not value.requires_grad:
        return value
    return to_device(value.detach(), start.device).to(start.dtype)
