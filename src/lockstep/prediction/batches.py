"""The batches of a pass over data, in the form that is cut into shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep import nest
from lockstep.data import Samples
from lockstep.precision import Precision
from lockstep.updaters import Converter


def as_cuttable(batch: Any, converter: Converter | None, device: torch.device, *, name: str) -> Any:
    """Return a batch in the form that is cut into shards: `Samples`, or tensors.

    Args:
        batch: The batch.
        converter: Converts samples to tensors; None if batches must be tensors or `Samples`.
        device: The device to convert samples on that are not a sequence.
        name: The name of the source of the batch in error messages.

    Raises:
        TypeError: If the batch is something else, and there is no converter.
    """
    if isinstance(batch, Samples) or consists_of_tensors(batch, lists=converter is None):
        return batch
    # Strings and other values beside tensors are cut as those of a batch to train on.
    if converter is None and nest.has_tensor(batch):
        return batch
    if converter is None:
        raise TypeError(
            f"`{name}` must yield tensors, or tuples or dicts of tensors, if there is no `converter`, got "
            f"{_found(batch)}. Pass a converter that returns the tensors of a list of samples, and let "
            f"`{name}` yield lists of samples, as a lockstep.BatchIterator does."
        )
    if isinstance(batch, Sequence):
        return Samples(batch, range(len(batch)), batch)
    return converter(batch, device)


def _found(batch: Any) -> str:
    """Return the type of a batch, and that of the first entry in its containers that is not a tensor."""
    entry = batch
    while isinstance(entry, Mapping | tuple | list):
        entries = entry.values() if isinstance(entry, Mapping) else entry
        entry = next(each for each in entries if not consists_of_tensors(each, lists=True))
    name = type(batch).__name__
    return name if entry is batch else f"{name} that holds a {type(entry).__name__}"


def consists_of_tensors(batch: Any, *, lists: bool) -> bool:
    """Return whether a batch consists of tensors; without ``lists``, a list counts as a list of samples.

    Args:
        batch: The batch.
        lists: Whether a list is a container of tensors.
    """
    if isinstance(batch, Mapping):
        return all(consists_of_tensors(value, lists=lists) for value in batch.values())
    if isinstance(batch, tuple) or (lists and isinstance(batch, list)):
        return all(consists_of_tensors(value, lists=lists) for value in batch)
    return isinstance(batch, torch.Tensor)


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of batches of the given size; the last one may be shorter.

    Args:
        batches: The batches.
        size: The number of batches in a list, at least 1.
    """
    window: list[Any] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def in_held_precision(inputs: Any, precision: Precision) -> Any:
    """Convert the inputs of a model that is held in half precision to that precision; return others unchanged.

    Args:
        inputs: Nested tensors.
        precision: The precision of the model.
    """
    dtype = precision.held_dtype
    if dtype is None:
        return inputs
    return nest.map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)
