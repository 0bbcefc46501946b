"""Make the arrays of a shard from a batch of samples or from arrays that hold the whole batch."""

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

    Raises:
        ValueError: There are none, or tensors of the batch disagree in length.
    """
    size = len(batch.indices) if type(batch) is Samples else nest.rows(batch)
    if size == 0:
        raise ValueError("`batch` must hold at least one sample, got none.")
    return size


def shard_arrays(batch: Any, shard: Shard, device: torch.device, converter: Converter) -> Any:
    """Give the arrays of one shard on the device it runs on.

    Args:
        batch: `Samples`, which go through the converter, or a nest of tensors along whose first dimension
            the samples lie, which are cut as views (copies where the samples of a shard lie apart).
        shard: Which samples.
        device: Where to.
        converter: Makes arrays of samples.
    """
    part = shard.samples
    if type(batch) is Samples:
        return converter(batch[part.start : part.stop : part.step], device)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor if len(part) == tensor.size(0) else tensor[part.start : part.stop : part.step]
        # Kernels may round differently where elements lie apart.
        mine = mine if part.step == 1 else mine.contiguous()
        # Towards the CPU this waits: the host would read what has not arrived yet.
        return sent(mine, device)

    return nest.map_tensors(rows, batch)


def call_arguments(arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn the arrays of a shard into arguments: a tuple or list by position, a dict by name, else one.

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(arrays, (tuple, list)):
        return tuple(arrays), {}
    if isinstance(arrays, Mapping):
        return (), dict(arrays)
    return (arrays,), {}
