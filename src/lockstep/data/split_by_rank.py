"""Refuse sources of batches that give each rank another part of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_PARTS: Final = ("sampler", "batch_sampler", "dataset", "base_dataloader")
"""The attributes under which DataLoaders, and samplers around other samplers, hold what chooses samples."""

_COUNTS: Final = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""The attributes that tell how many processes share the samples, and which of them this one is.

PyTorch's and Hugging Face's samplers have the first pair, the shards of Hugging Face's Accelerate the second.
"""


def refuse_split_by_rank(source: object, name: str) -> None:
    """Refuse a source whose sampler gives this process only a part of each batch.

    Every rank has to be given whole batches, because the updater cuts them over the ranks itself.

    Args:
        source: What gives the batches, such as a DataLoader.
        name: The name of the argument for the error message.

    Raises:
        ValueError: A `DistributedSampler`, or a sampler like it, shares the samples among several processes.
    """
    for part in _chain(source):
        for count, place in _COUNTS:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1 and isinstance(getattr(part, place, None), int):
                kind = type(part).__name__
                raise ValueError(
                    f"`{name}` must give every rank the same batches, got a {type(source).__name__} with a {kind} "
                    f"({count}={number}), which gives each rank samples of its own. lockstep cuts every batch over "
                    f"the ranks itself: leave out the {kind}, and give the DataLoader the global batch size and a "
                    "plain sampler with the same seed on every rank, or give lockstep.BatchIterator(dataset, "
                    "batch_size, shuffle=True)."
                )


def _chain(source: object) -> Iterator[Any]:
    """Yield a source and what chooses samples for it, each once."""
    pending, seen = [source], set[int]()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        # Only what an object holds itself: an attribute may be computed, and a dataset's `dataset` be anything.
        held = getattr(part, "__dict__", {})
        pending += [held[name] for name in _PARTS if name in held]
