"""Create the arrays of a shard from a batch of samples, or from arrays that hold the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lockstep import nest
from lockstep.data import Samples
from lockstep.plan import Shard
from lockstep.precision import sent

Converter: TypeAlias = Callable[[Sequence[Any], torch.device], Any]
"""Called as ``converter(samples, device)``; returns the arrays of a shard on that device."""


def batch_size(batch: Any) -> int:
    """Count the samples of a batch.

    Args:
        batch: `Samples`, or nested tensors with the samples along their first dimension.

    Raises:
        ValueError: If there are no samples, or if tensors of the batch differ in length.
    """
    size = len(batch.indices) if type(batch) is Samples else nest.rows(batch)
    if size == 0:
        raise ValueError("`batch` must hold at least one sample, got none.")
    return size


def shard_arrays(batch: Any, shard: Shard, device: torch.device, converter: Converter) -> Any:
    """Return the arrays of one shard on the device it runs on.

    Args:
        batch: `Samples`, which are passed to the converter, or nested tensors with the samples along their first
            dimension, which are cut as views (or as copies if the samples of a shard are not adjacent).
        shard: The shard, which says which samples to take.
        device: The device to put the arrays on.
        converter: Converts samples to arrays.
    """
    part = shard.samples
    if type(batch) is Samples:
        return converter(batch[part.start : part.stop : part.step], device)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor if len(part) == tensor.size(0) else tensor[part.start : part.stop : part.step]
        # Kernels may round differently for strided arrays, and the bits must not depend on how shards are cut.
        mine = mine if part.step == 1 else mine.contiguous()
        # Transfers to the CPU wait here, because the host would otherwise read data that has not arrived yet.
        return sent(mine, device)

    return nest.map_tensors(rows, batch)


def call_arguments(arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the arrays of a shard to call arguments: a tuple or list by position, a dict by name, else one argument.

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(arrays, (tuple, list)):
        return tuple(arrays), {}
    if isinstance(arrays, Mapping):
        return (), dict(arrays)
    return (arrays,), {}
