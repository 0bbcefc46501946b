"""Reject sources of batches that give each rank a different part of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_PART_ATTRIBUTES: Final = ("sampler", "batch_sampler", "dataset", "base_dataloader")
"""The attributes in which DataLoaders, and samplers that wrap others, store the objects that select samples."""

_RANK_ATTRIBUTES: Final = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""The attributes for the number of processes that share the samples, and for the index of this process.

Samplers of PyTorch and Hugging Face have the first pair, the shards of Hugging Face Accelerate the second.
"""


def check_not_split_by_rank(source: object, name: str) -> None:
    """Check that a source has no sampler that gives this process only a part of each batch.

    Every rank needs whole batches, because the updater splits them over the ranks itself.

    Args:
        source: The source of the batches, such as a DataLoader.
        name: The name of the argument in error messages.

    Raises:
        ValueError: If a `DistributedSampler`, or a similar sampler, splits the samples over several processes.
    """
    for part in _parts(source):
        for count, index in _RANK_ATTRIBUTES:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1 and isinstance(getattr(part, index, None), int):
                kind = type(part).__name__
                raise ValueError(
                    f"`{name}` must give every rank the same batches, got a {type(source).__name__} with a {kind} "
                    f"({count}={number}), which gives each rank samples of its own. lockstep cuts every batch over "
                    f"the ranks itself: leave out the {kind}, and give the DataLoader the global batch size and a "
                    "plain sampler with the same seed on every rank, or give lockstep.BatchIterator(dataset, "
                    "batch_size, shuffle=True)."
                )


def _parts(source: object) -> Iterator[Any]:
    """Yield a source and the objects that select its samples, each once."""
    pending, seen = [source], set[int]()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        # Only stored attributes, because reading a computed one could have side effects.
        attributes = getattr(part, "__dict__", {})
        pending += [attributes[name] for name in _PART_ATTRIBUTES if name in attributes]
