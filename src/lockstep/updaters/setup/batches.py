"""Read batches, and create the tensors of shards from them, which shards may change in place."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import torch

from lockstep import nest
from lockstep.data import Iterator, Samples, collate
from lockstep.digest import checksum
from lockstep.errors import warn
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.precision import copy_to_device
from lockstep.replicas import BatchDim, count_samples, dims_by_name, longest_name, named_inputs, positive_dims
from lockstep.stopping import STOP
from lockstep.streams import (
    DEFAULT_GENERATOR_LOCK,
    DefaultStream,
    restored_generators,
    seed_python_and_numpy,
    stream_seed,
)

CACHE_LINE: Final = 64
"""The number of bytes to which kernels align what they read."""
MOST_SPREAD: Final = 8
"""The number of elements of memory per element of a tensor up to which a copy lies as the tensor does."""

PAIR: Final = 2
"""The length of what a dataset of nested samples leaves; a batch may well be of two samples."""

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
    # Nothing has changed since the last update, so a signal that ends the run need not wait for data.
    STOP.waits = True
    try:
        if STOP.received:
            STOP.end_wait()
        # The map ends where `peek` raises StopIteration, and what came first is kept.
        return list(map(iterator.peek, ahead))
    finally:
        STOP.waits = False


def own_iterator_error(what: str) -> RuntimeError:
    """Return the error for a `StopIteration` of your code, which must not pass for the end of the training data.

    Args:
        what: What has raised it.
    """
    return RuntimeError(
        f"{what} raised StopIteration, which is not the end of the training data: an iterator of your own has ended. "
        "Catch it, or begin again, as with itertools.cycle. To take further batches in an update, give the updater "
        "several iterators by name, and call `next_batch(name)`."
    )


def may_draw(batches: Sequence[Any]) -> bool:
    """Return whether samples may draw from generators that an audit must not move, so that they are not read again.

    Args:
        batches: The batches.
    """
    return any(type(batch) is Samples and batch.may_draw for batch in batches)


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
        if type(batch) is list:
            check_no_samples(batch)
        try:
            size = nest.rows(batch) if batch_dim == 0 else count_samples(*_dims(batch, batch_dim))
        except ValueError as error:
            kind = type(batch).__name__
            # One entry of a dataset has a label without dimensions.
            if not all(each.dim() for each in nest.tensors(batch)):
                kind += ". If it is a single sample, lockstep.collate([sample]) makes a batch of it"
            raise ValueError(f"{error} Got a batch of type {kind}. {CUTTING}") from None
    if size == 0:
        raise ValueError("`batch` must hold at least one sample, got none.")
    return size


def check_no_samples(batch: Sequence[Any]) -> None:
    """Check that a list is not one of samples, as ``collate_fn=list`` leaves it, whose tensors would be cut inside.

    Args:
        batch: The list. Other collate functions return lists of tensors, and nest them in lists.

    Raises:
        ValueError: If it holds tuples, or dicts with numbers or texts, which belong to one sample each.
    """
    kinds = {*map(type, batch)}
    plain = kinds == {dict} and any(isinstance(each, int | float | str) for each in batch[0].values())
    if len(batch) > 1 and (kinds == {tuple} or plain):
        raise ValueError(
            f"`batch` must hold tensors of all its samples, got a list of {len(batch)} {kinds.pop().__name__}s, which "
            "look like single samples. Pass lockstep.IterableBatches(source, batches_of='samples'); or, if each entry "
            "belongs to all samples, a tuple instead of the list."
        )


class ListRule:
    """Decides which lists, tuples and arrays beside the tensors of a batch have one entry per sample.

    Those that `batch_dim` names are cut, or given whole for None. Any other must have as many entries as there are
    samples in every batch to be cut: what had another number once is given whole from then on. A number is given whole.

    Args:
        batch_dim: The dimensions that count samples.
    """

    def __init__(self, batch_dim: BatchDim) -> None:
        self._dims = dims_by_name(_by_name(batch_dim)) if isinstance(batch_dim, Mapping) else {}
        self._whole: set[str] = set()
        self._has_warned_of_list = False
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
        if isinstance(value, (int, float)):
            return False
        length, named = len(value), longest_name(self._dims, name)
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

    def seen(self) -> ListRule:
        """Return a copy for parts of batches that this rule has seen, of which it does not warn again."""
        found = copy.deepcopy(self)
        found._has_warned_of_list = True  # noqa: SLF001 - of this class
        return found

    def check_tensors(self, parts: Iterable[Any], size: int) -> None:
        """Warn once of a list of tensors that may have one tensor per sample, because it has as many as samples.

        Args:
            parts: The parts of the batch. Each tensor in them has one row per sample.
            size: The number of samples in the batch.
        """
        for part in parts:
            # A pair of inputs is no list of samples, unless these are containers.
            is_alike = (
                type(part) is list and len(part) == size > 1 and (size > PAIR or not isinstance(part[0], torch.Tensor))
            )
            if is_alike and not self._has_warned_of_list and nest.has_tensor(part):
                self._has_warned_of_list = True
                warn(
                    f"`batch` holds a list of {size} entries, whose tensors have {size} rows, and {size} samples: the "
                    "tensors are cut along their rows. If the list has one entry per sample instead, give the samples "
                    "themselves: lockstep.IterableBatches(source, batches_of='samples') with a converter=. If not, "
                    "pass a tuple."
                )


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
    lists: list[str] = []
    if isinstance(batch_dim, Mapping):
        # Lists beside tensors have names, too.
        def note(name: str, _: Any) -> bool:
            lists.append(name)
            return False

        nest.cut_values(batch, range(0), note)
        batch_dim = _by_name(batch_dim)
    return names, tensors, positive_dims(batch_dim, names, tensors, "batch_dim", absent=lists)


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
        self._converter, self.batch_dim, self.seed = converter, batch_dim, seed
        self._lists = lists or ListRule(batch_dim)
        self._lent: tuple[Sequence[Any], DeviceShards] = (), []
        """The batches of the attempt that runs and its shards, if these are no copies."""
        self._has_changes = False
        """Whether shards have changed their tensors in place."""
        self.is_own = (converter.func if isinstance(converter, partial) else converter) is not collate
        """Whether the converter is not `collate`, and may draw random numbers or depend on other things."""

    def by(self, converter: Converter) -> Conversion:
        """Return the same conversion with another converter.

        Args:
            converter: The converter.
        """
        return Conversion(converter, self.batch_dim, self.seed, self._lists)

    def along(self, batch_dim: BatchDim) -> Conversion:
        """Return the same conversion for batches with their samples in other dimensions.

        Args:
            batch_dim: The dimension of tensors that counts samples.
        """
        return Conversion(self._converter, batch_dim, self.seed)

    def shards(
        self,
        batches: Sequence[Any],
        shards_by_device: Sequence[Sequence[Shard]],
        devices: Sequence[torch.device],
        first: int,
        stream: DefaultStream | None = None,
        *,
        lends: bool = False,
    ) -> DeviceShards:
        """Return the shards of each device with their tensors, which are on the device and may be changed in place.

        Args:
            batches: The batches.
            shards_by_device: The shards of each device.
            devices: The devices.
            first: The position of the random stream of shard 0.
            stream: Where a converter draws, if that is open already.
            lends: Whether tensors that are on the device may be parts of the batches instead of copies, where samples
                of a shard are adjacent. They are copied nevertheless if shards have changed theirs before.

        Raises:
            TypeError: If a converter returns None.
            ValueError: If a shard has changed a part of one of the batches in an attempt that was not completed.

        Determinism: While a converter of yours is called, the default generators of torch, Python and NumPy, and that
        of an accelerator, are at the start of a stream keyed by the seed, the position, the shard, and the indices of
        its samples. They are restored afterwards.
        """
        if stream is None and self.is_own and any(type(batch) is Samples for batch in batches):
            # Other updaters seed the default generator for their shards while they hold this lock.
            with DEFAULT_GENERATOR_LOCK, restored_generators(), DefaultStream(*devices) as opened:
                return self.shards(batches, shards_by_device, devices, first, opened)
        lent, former = self._lent
        if lent and any(each is other for each in batches for other in lent):
            _check_unchanged(former)
        tensors = [] if batches and type(batches[0]) is Samples else nest.tensors(list(batches))
        lends = lends and self.batch_dim == 0 and not self._has_changes and all(map(_is_plain, tensors))
        # Tensors elsewhere are copied to the devices in any case.
        own = {} if lends else {each: copied(each) for each in tensors if each.device in devices}
        device_shards: DeviceShards = []
        for run, device in zip(shards_by_device, devices, strict=True):
            given: list[tuple[Shard, Any]] = []
            device_shards.append(given)
            for shard in run:
                batch = batches[shard.batch]
                if type(batch) is Samples:
                    part = shard.samples
                    samples = batch if len(part) == len(batch.indices) else batch[part.start : part.stop : part.step]
                    if stream is not None:
                        self._seed_generators(stream, samples, first + shard.index)
                    try:
                        converted = self._converter(samples, device)
                    except StopIteration as error:
                        raise own_iterator_error("The dataset or the converter") from error
                    if converted is None:
                        raise TypeError("`converter` must return the tensors of the samples that it gets, got None.")
                    given.append((shard, converted))
                else:
                    given.append((shard, self._cut(batch, shard, device, own)))
        if lends and tensors:
            self._lent = batches, device_shards
        return device_shards

    def apart(self) -> Conversion:
        """Return a conversion that knows what this one knows of the batches, and whose use changes nothing here."""
        found = copy.copy(self)
        found._lists = self._lists.seen()  # noqa: SLF001 - of this class
        return found

    def keep_changes(
        self, batches: Sequence[Any], device_shards: DeviceShards, *, is_first: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Write to the batches what shards have changed in place, as a loop of PyTorch changes them.

        Args:
            batches: The batches of a final attempt.
            device_shards: Its shards with their tensors.
            is_first: Whether to look for changes that tensors do not count, as those of ``tensor.data``.

        Returns:
            What was changed, with its former values.
        """
        is_lent, self._lent = bool(self._lent[0]), ((), [])
        # What was lent has changed where it is.
        if is_lent or type(batches[0]) is Samples:
            return []
        found = changes(batches, device_shards, self.batch_dim)
        self._has_changes = self._has_changes or bool(found) or (is_first and self._differ(batches, device_shards))
        return _write_back(found) if found else []

    def _differ(self, batches: Sequence[Any], device_shards: DeviceShards) -> bool:
        """Return whether tensors of shards have other bits than the parts of batches that they are copies of."""
        if self.batch_dim != 0:
            return False
        for shard, given in (pair for run in device_shards for pair in run):
            part, wholes, tensors = shard.samples, nest.tensors(batches[shard.batch]), nest.tensors(given)
            # A loss function may also have emptied the container that it was given.
            if len(tensors) != len(wholes) or any(
                _is_plain(whole)
                and whole.device == mine.device
                and checksum(whole[part.start : part.stop : part.step]) != checksum(mine)
                for whole, mine in zip(wholes, tensors, strict=True)
            ):
                return True
        return False

    def _seed_generators(self, stream: DefaultStream, samples: Samples, position: int) -> None:
        """Seed the generators for the conversion of some samples."""
        # The indices tell several batches of an update apart; a batch that is converted again is the same.
        own = (self.seed << 96) + (CONVERSION_TAG << 32)
        seed = stream_seed(own + crc32(array("q", samples.indices)), position)
        stream.seed(seed)
        seed_python_and_numpy(seed)

    def _cut(self, batch: Any, shard: Shard, device: torch.device, own: Mapping[torch.Tensor, torch.Tensor]) -> Any:
        """Return the tensors of one shard: views of copies, or copies of these if its samples are not adjacent.

        Args:
            batch: The batch.
            shard: The shard.
            device: The device of the tensors.
            own: The copies of the tensors of the batch, which shards may change in place.
        """
        part, dims = shard.samples, self.batch_dim
        # Most batches are tensors, or tuples and dicts of nothing else, and need no look at their values.
        parts = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, dict) else (batch,)
        if not all(isinstance(each, torch.Tensor) for each in parts):
            size, leading = batch_size(batch, dims), nest.tensors(batch)[0]
            if dims == 0:
                self._lists.check_tensors(parts, size)
            batch = nest.cut_values(
                batch,
                part,
                lambda name, value: len(part) < size and self._lists.counts(name, value, size, leading),
                "0" if nest.is_record(batch) else "",
            )

        each_dim = repeat(0) if dims == 0 else iter(_dims(batch, dims)[2])

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            dim, tensor = next(each_dim), own.get(tensor, tensor)
            # Rows that are all rows need no cut, and may be those of a sparse or nested tensor.
            if dim is not None and not (dims == 0 and len(part) == tensor.size(0)):
                tensor = _strided(tensor)[(slice(None),) * dim + (slice(part.start, part.stop, part.step),)]
            # Contiguous where a part is not adjacent, so that a shard has the strides of a tensor of its size: kernels
            # may round differently for others, and the bits must not depend on how shards are cut.
            if dim is not None and not (dims == 0 and part.step == 1):
                tensor = tensor.contiguous()
            return copy_to_device(_counted_apart(tensor), device)

        return nest.map_tensors(cut, batch)


def _counted_apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose in-place changes are counted from 0, apart from those of other shards.

    With a common counter, backward of one shard would refuse what another one has changed in its own samples.
    """
    return tensor.data if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a part of a tensor is what a copy of it would be, with a count of changes of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    is_marked = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not (is_marked or tensor.requires_grad or tensor.is_inference())


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


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of a tensor that begins at the same place of a cache line.

    Kernels may round by both. A tensor that requires a gradient is returned itself, and one that is spread over many
    times its own size, as a column of a table, is copied densely.

    Args:
        tensor: The tensor.
    """
    if tensor.requires_grad:
        return tensor
    strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if not strided or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor.clone()
    if tensor.is_contiguous() and tensor.data_ptr() % CACHE_LINE == 0:
        # New memory begins at a cache line, too.
        return tensor.clone()
    span = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    if span > MOST_SPREAD * tensor.numel():
        return tensor.clone()
    size = tensor.element_size()
    room = tensor.new_empty(span + CACHE_LINE // size)
    start = (tensor.data_ptr() - room.data_ptr()) % CACHE_LINE // size
    room[start : start + span].copy_(tensor.as_strided((span,), (1,)))
    return room.as_strided(tensor.shape, tensor.stride(), start)


class Change(NamedTuple):
    """A tensor of a shard that was changed in place.

    Attributes:
        name: Its name in the batch.
        new: The tensor.
        old: The part of the batch that it is a copy of.
        is_whole: Whether every shard is given all of it.
    """

    name: str
    new: torch.Tensor
    old: torch.Tensor
    is_whole: bool


def changes(batches: Sequence[Any], device_shards: DeviceShards, batch_dim: BatchDim) -> list[Change]:
    """List what shards have changed in their copies of batches.

    Args:
        batches: The batches that the copies were made of.
        device_shards: The shards with their tensors, after they were computed.
        batch_dim: The dimension of tensors that counts samples.
    """
    found: list[Change] = []
    for shard, given in (pair for run in device_shards for pair in run):
        batch, part = batches[shard.batch], shard.samples
        if type(batch) is Samples or not _is_changed(given):
            continue
        for name, whole, dim, new in zip(*_dims(batch, batch_dim), nest.tensors(given), strict=True):
            # A loop that copies a batch to another device does not change the batch either.
            if not new.is_inference() and new._version and whole.device == new.device and not whole.requires_grad:
                cut = () if dim is None else ((slice(None),) * dim + (slice(part.start, part.stop, part.step),))
                found.append(Change(name, new, whole[cut], dim is None))
    return found


def _check_unchanged(device_shards: DeviceShards) -> None:
    """Check that no shard has changed its tensors, which are parts of the batches that they are cut from again."""
    if any(_is_changed(given) for run in device_shards for _, given in run):
        raise ValueError(
            "`loss_fn` must not begin to change its batch in place after the first updates, got a change in an attempt "
            "that was not completed, so that this batch cannot be computed again. Continue from a snapshot, and use "
            "operations that return new tensors."
        )


def _is_changed(given: Any) -> bool:
    """Return whether the tensors of a shard were changed in place, which each of them counts from 0."""
    return any(not each.is_inference() and each._version for each in nest.tensors(given))


@torch.no_grad()
def _write_back(found: Sequence[Change]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write changes of shards to their batches; return what was changed, with its former values."""
    before = [(each.old, each.old.clone()) for each in found]
    for each in found:
        each.old.copy_(each.new)
    return before


def check_whole(found: Sequence[Change]) -> None:
    """Check that no shard of several has changed a tensor that all of them are given whole.

    Raises:
        ValueError: If one has.
    """
    for each in found:
        if each.is_whole:
            raise ValueError(
                f"`batch` holds a tensor at {each.name!r} that every shard gets whole. It must not be changed in place "
                "by the loss function, got a change, which other shards would find. Use operations that return new "
                "tensors."
            )
