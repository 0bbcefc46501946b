"""Read batches, and create the tensors of a shard from samples or from tensors that hold the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from lockstep import nest
from lockstep.data import Iterator, Samples
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.precision import copy_to_device
from lockstep.replicas import BatchDim, count_samples, dims_by_path, named_inputs, positive_dim
from lockstep.stopping import STOP

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


def shard_tensors(batch: Any, shard: Shard, device: torch.device, converter: Converter, batch_dim: BatchDim = 0) -> Any:
    """Return the tensors of one shard on the device it runs on.

    Args:
        batch: `Samples`, which are passed to the converter, or nested tensors with the samples along their first
            dimension, which are cut as views (or as copies if the samples of a shard are not adjacent). Lists and
            arrays with one entry per sample are cut as well.
        shard: The shard, which says which samples to take.
        device: The device to put the tensors on.
        converter: Converts samples to tensors.
        batch_dim: The dimension of tensors that counts samples, if it is not the first one of all tensors.
    """
    part = shard.samples
    if type(batch) is Samples:
        return converter(batch[part.start : part.stop : part.step], device)
    # Most batches are tensors, or tuples and dicts of nothing else, and need no look at their values.
    parts = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, dict) else (batch,)
    if not all(isinstance(each, torch.Tensor) for each in parts):
        batch = nest.cut_values(batch, part, batch_size(batch, batch_dim))

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor if len(part) == tensor.size(0) else _strided(tensor)[part.start : part.stop : part.step]
        # Kernels may round differently for strided tensors, and the bits must not depend on how shards are cut.
        mine = mine if part.step == 1 else mine.contiguous()
        return copy_to_device(mine, device)

    if batch_dim == 0:
        return nest.map_tensors(rows, batch)
    dims = iter(_dims(batch, batch_dim)[2])

    def along(tensor: torch.Tensor) -> torch.Tensor:
        dim = next(dims)
        if dim is None:
            return copy_to_device(tensor, device)
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


def _dims(batch: Any, batch_dim: BatchDim) -> tuple[list[str], list[torch.Tensor], list[int | None]]:
    """Return the tensors of a batch, their names (a position or a key), and the dimension of each that counts samples.

    Raises:
        ValueError: If a tensor lacks its dimension, or if `batch_dim` names none of them.
    """
    args, kwargs = call_arguments(batch)
    named = list(named_inputs(args, kwargs, list(map(str, range(len(args))))))
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    by_name = {str(name): dim for name, dim in batch_dim.items()} if isinstance(batch_dim, Mapping) else batch_dim
    dims = dims_by_path(by_name, names, "batch_dim")
    for index, dim in enumerate(dims):
        if dim is not None:
            dims[index] = positive_dim(names[index], tensors[index], dim)
    return names, tensors, dims
