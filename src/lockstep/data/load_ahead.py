"""Load batches ahead of their use, and of each only the samples that will be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from lockstep.data.prefetch import fetch_ahead
from lockstep.data.sample_streams import StreamedDataset
from lockstep.data.samples import NOT_FETCHED, MapDataset, Samples

Wish: TypeAlias = "tuple[Samples, Sequence[int]]"
"""A batch, and the ascending places in it of the samples to load."""


def load_ahead(
    wishes: Iterable[Wish], dataset: MapDataset, *, in_streams: bool, num_workers: int, seed: int
) -> Generator[Samples]:
    """Give batches whose samples were loaded in worker processes.

    Args:
        wishes: The batches in order; read some batches ahead.
        dataset: Where their samples come from.
        in_streams: Whether each sample is loaded in its own random stream.
        num_workers: At least 1.
        seed: Of the random numbers of the workers outside of streams.

    Raises:
        Exception: What the dataset raised, as PyTorch's loader reports it.
    """
    # The workers' queue asks for batches before they are given out, so what was asked for is kept.
    asked: deque[Wish] = deque()
    loader = StreamedDataset(dataset) if in_streams else dataset
    for fetched in fetch_ahead(loader, _keys(wishes, asked), num_workers=num_workers, seed=seed):
        batch, places = asked.popleft()
        yield replace(batch, fetched=_in_place(fetched, places, len(batch)))


def _keys(wishes: Iterable[Wish], asked: deque[Wish]) -> Generator[Sequence[Any]]:
    """Name the samples of each batch that workers shall load, and remember the batch."""
    for batch, places in wishes:
        asked.append((batch, places))
        indices = batch.indices
        if batch.streams is None:
            yield [indices[place] for place in places]
        else:
            seeds = batch.streams.seeds(indices)
            yield [(indices[place], seeds[place]) for place in places]


def _in_place(fetched: Sequence[Any], places: Sequence[int], size: int) -> Sequence[Any]:
    """Put samples to their places in a batch of this size."""
    if len(places) == size:
        return fetched
    samples = [NOT_FETCHED] * size
    for place, sample in zip(places, fetched, strict=True):
        samples[place] = sample
    return samples
