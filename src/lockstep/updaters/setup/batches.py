"""Read batches, create the tensors of shards from them, and undo what shards change in place if they run again."""

from __future__ import annotations

import random
import sys
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias
from zlib import crc32

import torch

from lockstep import nest
from lockstep.data import Iterator, Samples, collate
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.precision import copy_to_device
from lockstep.replicas import (
    BatchDim,
    count_samples,
    dims_by_name,
    dims_by_path,
    longest_name,
    named_inputs,
    positive_dim,
)
from lockstep.stopping import STOP
from lockstep.streams import DEFAULT_GENERATOR_LOCK, DefaultStream, restored_generators, stream_seed

CACHE_LINE: Final = 64
"""The number of bytes to which kernels align what they read."""

CUTTING: Final = (
    "Tuples, lists, dicts and dataclasses of tensors are cut into shards, by default along the first dimension of "
    "every tensor; `batch_dim` names other dimensions, and None for a tensor that every shard gets whole. Leave out a "
    "number by which the model divides its loss, such as num_items_in_batch: the loss of a shard is the mean over the "
    "shard, with weights if necessary, as lockstep.token_mean() or Loss(value, weight=...) compute it. For other "
    "batches, such as graphs or images with boxes, give the samples themselves and collate those of each shard by a "
    "`converter`, which is called with (samples, device). lockstep.BatchIterator(dataset, batch_size) gives samples, "
    "and so does lockstep.IterableBatches(DataLoader(..., collate_fn=list), batches_of='samples')."
)

Converter: TypeAlias = Callable[[Sequence[Any], torch.device], Any]
"""Called as ``converter(samples, device)``; returns the tensors of a shard on that device."""

DeviceShards: TypeAlias = "list[list[tuple[Shard, Any]]]"
"""The shards of each device, each with its tensors."""

CONVERSION_TAG: Final = 0x434F4E56455254
"""Separates the streams of converters from those of shards and samples, which may have the same seed."""


def read_batches(iterator: Iterator, ahead: range) -> list[Any]:
    """Read batches of an iterator without advancing it; fewer, or none, where it ends.

    Args:
        iterator: The iterator.
        ahead: The positions of the batches, counted from the next one.

    Raises:
        SignalExit: If a signal ends the run.
    """
    batches: list[Any] = []
    # Nothing has changed since the last update, so a signal that ends the run need not wait for data.
    STOP.waits = True
    try:
        if STOP.received:
            STOP.end_wait()
        for position in ahead:
            batches.append(iterator.peek(position))  # noqa: PERF401 - what came first is kept
    except StopIteration:
        pass
    finally:
        STOP.waits = False
    return batches


def batch_size(batch: Any, batch_dim: BatchDim = 0) -> int:
    """Count the samples of a batch.

    Args:
        batch: `Samples`, or nested tensors with the samples along their first dimension.
        batch_dim: The dimension that counts samples, if it is not the first one of all tensors.

    Raises:
        ValueError: If there are no samples, or if tensors of the batch differ in length.
    """
    if type(batch) is Samples:
        size = len(batch.indices)
    else:
        try:
            size = nest.rows(batch) if batch_dim == 0 else count_samples(*_dims(batch, batch_dim))
        except ValueError as error:
            raise ValueError(f"{error} Got a batch of type {type(batch).__name__}. {CUTTING}") from None
    if size == 0:
        raise ValueError("`batch` must hold at least one sample, got none.")
    return size


class ListRule:
    """Decides which lists, tuples and arrays beside the tensors of a batch have one entry per sample.

    Those that `batch_dim` names are cut, or given whole for None. Any other must have as many entries as there are
    samples in every batch to be cut: what had another number once is given whole from then on. A number is given whole,
    and a warning names a whole number that may count something in the batch, unless `batch_dim` names it.

    Args:
        batch_dim: The dimensions that count samples.
    """

    def __init__(self, batch_dim: BatchDim) -> None:
        self._dims = dims_by_name(_by_name(batch_dim)) if isinstance(batch_dim, Mapping) else {}
        self._whole: set[str] = set()
        self._warned: set[str] = set()
        self._cut: dict[str, tuple[Any, int]] = {}

    def counts(self, name: str, value: Any, size: int, first: torch.Tensor) -> bool:
        """Return whether a value has one entry per sample.

        Args:
            name: The name of the value in the batch.
            value: The list, tuple, array or number.
            size: The number of samples in the batch.
            first: The first tensor of the batch, which is cut into several shards.

        Raises:
            ValueError: If `batch_dim` names the value and it has another length, or if it has been cut before and
                belongs to no samples, because it has another length now or is the same object in another batch.
        """
        named = longest_name(self._dims, name)
        if isinstance(value, (int, float)):
            # Entries of lists, fractions, 0 and 1 are no counts by which a loss is divided.
            if named is None and "[" not in name and value == value // 1 > 1 and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"`batch` holds the number {value} at {name!r}, which every shard gets whole. If a loss is divided "
                    "by it as by the number of samples or tokens in the batch, the gradient is too small by the number "
                    "of shards: leave the number out, and let each shard return the mean over its own samples or "
                    "tokens, with a weight if necessary (lockstep.token_mean() or Loss(value, weight=...)). If it is a "
                    f"constant, such as a temperature, pass batch_dim={{{name!r}: None}}.",
                    UserWarning,
                    stacklevel=2,
                )
            return False
        length = len(value)
        if named is not None and self._dims[named] is None:
            return False
        if named is None and (name in self._whole or (length != size and name not in self._cut)):
            self._whole.add(name)
            return False
        before, of = self._cut.get(name, (None, 0))
        what = f"got a {type(value).__name__} with {length} entries in a batch of {size} samples"
        if length != size:
            rule = f"must hold one entry per sample at {name!r}, like the batches before"
            raise ValueError(f"`batch` {rule}, {what}. {_unless_whole(name)}")
        if named is None and before is value and of != id(first):
            rule = f"must hold the entries of its own samples at {name!r}"
            raise ValueError(f"`batch` {rule}, {what}, which is that of the batch before. {_unless_whole(name)}")
        self._cut[name] = value, id(first)
        return True


def _unless_whole(name: str) -> str:
    """Return how to say which values are given whole."""
    return f"If every shard needs it whole, such as weights of classes, pass batch_dim={{{name!r}: None}}."


def _dims(batch: Any, batch_dim: BatchDim) -> tuple[list[str], list[torch.Tensor], list[int | None]]:
    """Return the tensors of a batch, their names (a position or a key), and the dimension of each that counts samples.

    Raises:
        ValueError: If a tensor lacks its dimension, or if `batch_dim` names none of them.
    """
    args, kwargs = call_arguments(batch)
    named = list(named_inputs(args, kwargs, list(map(str, range(len(args))))))
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    if isinstance(batch_dim, Mapping):
        lists: list[str] = []

        def note(name: str, _: Any) -> bool:
            lists.append(name)
            return False

        nest.cut_values(batch, range(0), note)
        dims = dims_by_path(_by_name(batch_dim), [*names, *lists], "batch_dim")[: len(names)]
    else:
        dims = [batch_dim] * len(names)
    for index, dim in enumerate(dims):
        if dim is not None:
            dims[index] = positive_dim(names[index], tensors[index], dim)
    return names, tensors, dims


def _by_name(batch_dim: Mapping[Any, Any]) -> dict[str, Any]:
    """Return dimensions by name, where positions are names, too."""
    return {str(name): dim for name, dim in batch_dim.items()}


class Conversion:
    """Creates the tensors of shards. What a converter draws meanwhile belongs to the shard and to its samples.

    Args:
        converter: Converts samples to tensors.
        batch_dim: The dimension of tensors that counts samples.
        seed: The seed of the random streams.
        lists: Decides which lists beside tensors are cut; None for a rule that has not seen a batch.
    """

    def __init__(self, converter: Converter, batch_dim: BatchDim, seed: int, lists: ListRule | None = None) -> None:
        self._converter, self.batch_dim, self._given_seed = converter, batch_dim, seed
        self._seed = (seed << 96) + (CONVERSION_TAG << 32)
        self._lists = lists or ListRule(batch_dim)
        self.is_own = (converter.func if isinstance(converter, partial) else converter) is not collate
        """Whether the converter is not `collate`, and may draw random numbers or depend on other things."""

    def by(self, converter: Converter) -> Conversion:
        """Return the same conversion with another converter.

        Args:
            converter: The converter.
        """
        return Conversion(converter, self.batch_dim, self._given_seed, self._lists)

    def shards(
        self,
        batches: Sequence[Any],
        shards_by_device: Sequence[Sequence[Shard]],
        devices: Sequence[torch.device],
        first: int,
        stream: DefaultStream | None = None,
    ) -> DeviceShards:
        """Return the shards of each device with their tensors, which are on the device.

        Args:
            batches: The batches.
            shards_by_device: The shards of each device.
            devices: The devices.
            first: The position of the random stream of shard 0.
            stream: Where a converter draws, if that is open already.

        Determinism: While a converter of yours is called, the default generators of torch, Python and NumPy, and that
        of an accelerator, are at the start of a stream keyed by the seed, the position, the shard, and the indices of
        its samples. They are restored afterwards.
        """
        if stream is None and self.is_own and any(type(batch) is Samples for batch in batches):
            # Other updaters seed the default generator for their shards while they hold this lock.
            with DEFAULT_GENERATOR_LOCK, restored_generators(), DefaultStream(*devices) as opened:
                return self.shards(batches, shards_by_device, devices, first, opened)
        device_shards: DeviceShards = []
        for run, device in zip(shards_by_device, devices, strict=True):
            device_shards.append([])
            for shard in run:
                given = self._cut(batches[shard.batch], shard, device, first, stream)
                device_shards[-1].append((shard, given))
        return device_shards

    def _cut(self, batch: Any, shard: Shard, device: torch.device, first: int, stream: DefaultStream | None) -> Any:
        """Return the tensors of one shard: views of a batch of tensors, or copies if its samples are not adjacent."""
        part, dims = shard.samples, self.batch_dim
        if type(batch) is Samples:
            samples = batch[part.start : part.stop : part.step]
            if stream is not None:
                # The indices tell several batches of an update apart; a batch that is converted again is the same.
                seed = stream_seed(self._seed + crc32(array("q", samples.indices)), first + shard.index)
                stream.seed(seed)
                random.seed(seed)
                # What draws from NumPy has imported it.
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed)
            return self._converter(samples, device)
        # Most batches are tensors, or tuples and dicts of nothing else, and need no look at their values.
        parts = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, dict) else (batch,)
        if not all(isinstance(each, torch.Tensor) for each in parts):
            size, leading = batch_size(batch, dims), nest.tensors(batch)[0]
            batch = nest.cut_values(
                batch,
                part,
                lambda name, value: len(part) < size and self._lists.counts(name, value, size, leading),
                "0" if nest.is_record(batch) else "",
            )

        # `data`, so that in-place changes of a shard are counted apart from those of others: with a common counter,
        # backward of one shard would refuse what another one has changed in its own samples.
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            mine = tensor if len(part) == tensor.size(0) else _strided(tensor)[part.start : part.stop : part.step]
            # Kernels may round differently for strided tensors, and the bits must not depend on how shards are cut.
            mine = mine if part.step == 1 else mine.contiguous()
            return copy_to_device(mine.data if type(mine) is torch.Tensor and not mine.requires_grad else mine, device)

        if dims == 0:
            return nest.map_tensors(rows, batch)
        each_dim = iter(_dims(batch, dims)[2])

        def along(tensor: torch.Tensor) -> torch.Tensor:
            dim = next(each_dim)
            if dim is None:
                return copy_to_device(tensor if tensor.requires_grad else tensor.data, device)
            # Contiguous, so that a shard has the strides of a tensor of its size, as one that is cut along the first
            # dimension has.
            return copy_to_device(
                _strided(tensor)[(slice(None),) * dim + (slice(part.start, part.stop, part.step),)].contiguous(), device
            )

        return nest.map_tensors(along, batch)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be cut.

    Raises:
        ValueError: If the tensor is sparse or nested.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"one with layout {tensor.layout}"
        raise ValueError(
            f"`batch` must hold dense tensors to be cut into shards, got {kind}. Name an input that every shard needs "
            f"whole in `batch_dim`, with None. {CUTTING}"
        )
    return tensor


class ShardData:
    """The tensors of the shards of one attempt, which a loss function may change in place.

    Args:
        batches: The batches.
        device_shards: The shards of each device, with their tensors.
        copied: Whether to copy the tensors, so that they can be restored.

    Attributes:
        copies: The tensors with their versions and copies; empty if they were not copied.
    """

    __slots__ = ("_batches", "_device_shards", "copies")

    def __init__(self, batches: Sequence[Any], device_shards: DeviceShards, *, copied: bool) -> None:
        self._batches, self._device_shards = batches, list(device_shards)
        self.copies: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        if copied:
            given = [each for place in range(len(device_shards)) for _, each in self._named(place)]
            self.copies = {each: (each._version, each.detach().clone()) for each in given if not each.is_inference()}

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self._device_shards)

    def _named(self, place: int) -> list[tuple[str, torch.Tensor]]:
        """List the tensors of the shards of a device with their names."""
        return [pair for _, given in self._device_shards[place] for pair in nest.named_tensors(given)]

    def originals(self, place: int, index: int) -> Any:
        """Return the tensors of a shard with the values that they had first, in memory of their own.

        Args:
            place: The index of the device that the shard belongs to.
            index: The position of the shard among those of the device.
        """

        def original(tensor: torch.Tensor) -> torch.Tensor:
            return _copied_at(tensor, self.copies[tensor][1]) if tensor in self.copies else tensor

        return nest.map_tensors(original, self._device_shards[place][index][1])

    @property
    def has_changed(self) -> bool:
        """Whether a tensor that was copied has changed since."""
        return any(tensor._version != version for tensor, (version, _) in self.copies.items())

    @torch.no_grad()
    def restore(self, place: int) -> None:
        """Undo what the shards of a device have changed in place.

        Args:
            place: The index of the device.

        Raises:
            ValueError: If there are no copies, and a batch has changed.
        """
        tensors = [each for each in self._batches if type(each) is not Samples]
        own = {each.untyped_storage().data_ptr() for each in nest.tensors(tensors) if _has_memory(each)}
        for name, tensor in self._named(place):
            version, copy = self.copies.get(tensor, (0, None))
            if not _has_memory(tensor) or tensor._version == version:
                continue
            if copy is not None:
                tensor.copy_(copy)
            # Views of a batch are counted from 0. What a converter has made is made again.
            elif tensor.untyped_storage().data_ptr() in own:
                raise ValueError(
                    f"`{name}` must not be changed in place by a shard that runs again, if none of the first updates "
                    "has done so, got a change. Use operations that return new tensors, such as x * 2 for x.mul_(2)."
                )

    @torch.no_grad()
    def write_back(self, batch_dim: BatchDim) -> None:
        """Write to the batches what shards have changed in contiguous copies of their samples.

        Args:
            batch_dim: The dimension of tensors that counts samples.
        """
        for shard, given in (pair for run in self._device_shards for pair in run):
            batch = self._batches[shard.batch]
            if type(batch) is Samples:
                continue
            part = slice(shard.samples.start, shard.samples.stop, shard.samples.step)
            _, wholes, dims = _dims(batch, batch_dim)
            for whole, dim, mine in zip(wholes, dims, nest.tensors(given), strict=True):
                changed = mine in self.copies and mine._version != self.copies[mine][0]
                # A loop that copies a batch to another device does not change the batch either.
                if changed and dim is not None and whole.device == mine.device:
                    whole[(slice(None),) * dim + (part,)].copy_(mine)

    def check_whole(self) -> None:
        """Check that no shard of several has changed a tensor that all of them are given whole.

        Raises:
            ValueError: If one has.
        """
        whole = {(each.data_ptr(), each.numel()) for each in nest.tensors(self._batches) if _has_memory(each)}
        for place in range(len(self._device_shards)):
            for name, each in self._named(place):
                changed = each in self.copies and each._version != self.copies[each][0]
                if changed and _has_memory(each) and (each.data_ptr(), each.numel()) in whole:
                    raise ValueError(
                        f"`{name}`, which every shard gets whole, must not be changed in place by the loss function, "
                        "got a change, which other shards would find. Use operations that return new tensors."
                    )


class KeptBatches:
    """The tensors of shards that may run again, which then find what they found first.

    What a loss function changes in a batch stays changed, as in a loop of PyTorch. But shards run more than once after
    an overflow, an error or Ctrl-C, for a `BatchLoss`, and when an optimizer evaluates its closure again. Where none of
    the first updates changes a batch, nothing is copied later, and a change is refused when a shard runs again.

    Attributes:
        unsettled: The tensors of attempts that are not final, or whose update has failed.
        has_changes: Whether a loss function has changed a batch in place.
    """

    def __init__(self) -> None:
        self.unsettled: list[ShardData] = []
        self.has_changes = False

    def restore(self) -> None:
        """Undo what shards have changed in place, the last change first.

        Raises:
            ValueError: If there are no copies, and a batch has changed.
        """
        for data in reversed(self.unsettled):
            for place in range(data.num_devices):
                data.restore(place)
        self.unsettled.clear()

    def settle(self, batch_dim: BatchDim) -> None:
        """Keep what shards have changed in place, also where they have contiguous copies of their samples.

        Args:
            batch_dim: The dimension of tensors that counts samples.
        """
        for data in self.unsettled:
            data.write_back(batch_dim)
        self.unsettled.clear()

    def check(self, num_shards: int) -> None:
        """Find out whether a loss function changes batches in place, and check that it may.

        Args:
            num_shards: The number of shards.

        Raises:
            ValueError: If it has changed a tensor that each of several shards is given whole.
        """
        for data in self.unsettled:
            if data.has_changed:
                self.has_changes = True
                if num_shards > 1:
                    data.check_whole()


def _copied_at(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at the same place of a cache line as a tensor, because kernels may round by this.

    Args:
        tensor: The tensor.
        values: What to copy: dense, of the same dtype and on the same device.
    """
    if type(tensor) is not torch.Tensor:
        return values.clone()
    size = values.element_size()
    room = values.new_empty(values.numel() + CACHE_LINE // size)
    start = (tensor.data_ptr() - room.data_ptr()) % CACHE_LINE // size
    return room.as_strided(values.size(), values.stride(), start).copy_(values)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory of its own, and counts its changes."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_inference()
