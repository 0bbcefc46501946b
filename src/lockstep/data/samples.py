"""Some samples of a dataset, named by index and loaded when somebody asks for them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final, overload, runtime_checkable

from lockstep.data.sample_streams import SampleStreams, load_in_streams

NOT_FETCHED: Final = object()
"""Stands in the place of a sample that was not loaded ahead, because nobody was to read it."""


@runtime_checkable
class MapDataset(Protocol):
    """A dataset with a length whose samples are found by index, as `torch.utils.data.Dataset` has it."""

    def __len__(self) -> int:
        """Count the samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Load one sample."""


@runtime_checkable
class _ManyAtOnce(Protocol):
    """A dataset that can load several samples in one go, as PyTorch's own loader asks it to."""

    def __getitems__(self, indices: list[int], /) -> Sequence[Any]: ...


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Samples(Sequence[Any]):
    """Samples of a dataset by index, as a sequence; each is loaded when it is asked for, every time.

    A slice loads nothing, so whoever cuts a batch into shards and reads only some of them loads
    only those.

    Args:
        dataset: Where the samples come from.
        indices: Which samples, in which order; an index may occur more than once.
        fetched: The samples themselves, where somebody has loaded them ahead; one for each index, or
            `NOT_FETCHED` for one that is to be loaded when it is asked for after all.
        streams: The random streams to load them in, one for each index; None for whatever the
            generators hold.

    >>> samples = Samples("abcdef", [5, 0, 3, 3])
    >>> len(samples), samples[0], list(samples[1:])
    (4, 'f', ['a', 'd', 'd'])
    >>> samples[1:].indices
    (0, 3, 3)
    """

    dataset: MapDataset
    indices: Sequence[int]
    fetched: Sequence[Any] | None = None
    streams: SampleStreams | None = None

    def __post_init__(self) -> None:
        # Ranges and tuples cannot change behind our back, and are what slices hand on.
        if not isinstance(self.indices, range | tuple):
            object.__setattr__(self, "indices", tuple(map(operator.index, self.indices)))
        if self.fetched is not None and len(self.fetched) != len(self.indices):
            counts = f"{len(self.fetched)} for {len(self.indices)}"
            raise ValueError(f"`fetched` must hold one sample for each of `indices`, got {counts}.")
        if self.streams is not None and len(self.streams.ordinals) != len(self.indices):
            counts = f"{len(self.streams.ordinals)} for {len(self.indices)}"
            raise ValueError(f"`streams` must hold one stream for each of `indices`, got {counts}.")

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, key: int, /) -> Any: ...
    @overload
    def __getitem__(self, key: slice, /) -> Samples: ...
    def __getitem__(self, key: int | slice, /) -> Any:
        if isinstance(key, slice):
            fetched = None if self.fetched is None else self.fetched[key]
            streams = None if self.streams is None else self.streams[key]
            return Samples(self.dataset, self.indices[key], fetched, streams)
        if self.fetched is not None and self.fetched[key] is not NOT_FETCHED:
            return self.fetched[key]
        if self.streams is None:
            return self.dataset[self.indices[key]]
        # A negative place becomes the slice that it means.
        return self._unfetched(range(len(self))[key]).fetch()[0]

    def __iter__(self) -> Iterator[Any]:
        if self.streams is not None:
            # What is drawn between two samples is not theirs, and to change streams for each is dear.
            return iter(self.fetch())
        # Not the iteration that `Sequence` offers: it takes an IndexError of the dataset for the end.
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        return f"Samples({type(self.dataset).__name__}, {self.indices})"

    def _unfetched(self, place: int) -> Samples:
        streams = None if self.streams is None else self.streams[place : place + 1]
        return Samples(self.dataset, self.indices[place : place + 1], streams=streams)

    def fetch(self) -> list[Any]:
        """Load all samples, in one go where the dataset has ``__getitems__`` and no streams are asked for.

        Several samples that are loaded in one go cannot each have a random stream.

        Raises:
            ValueError: The dataset's ``__getitems__`` gave another number of samples than asked for.
        """
        if self.fetched is not None:
            return [
                self._unfetched(place).fetch()[0] if sample is NOT_FETCHED else sample
                for place, sample in enumerate(self.fetched)
            ]
        if self.streams is not None:
            seeds = self.streams.seeds(self.indices)
            return load_in_streams(self.dataset.__getitem__, self.indices, seeds)
        if not isinstance(self.dataset, _ManyAtOnce):
            return [self.dataset[index] for index in self.indices]
        samples = list(self.dataset.__getitems__(list(self.indices)))
        if len(samples) != len(self.indices):
            rule = f"must return one sample for each of the {len(self.indices)} indices"
            raise ValueError(f"`{type(self.dataset).__name__}.__getitems__` {rule}, got {len(samples)}.")
        return samples
