"""Samples of a dataset, identified by index and loaded when they are read."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final, overload, runtime_checkable

from lockstep.data.sample_streams import SampleStreams, draws_no_numbers, load_in_streams

NOT_FETCHED: Final = object()
"""A placeholder for a sample that was not loaded in advance, because this process was not expected to read it."""


@runtime_checkable
class MapDataset(Protocol):
    """A dataset with a length whose samples are accessed by index, like `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Load one sample."""


@runtime_checkable
class _BatchedDataset(Protocol):
    """A dataset that can load several samples in one call, which PyTorch's DataLoader uses too."""

    def __getitems__(self, indices: list[int], /) -> Sequence[Any]: ...


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Samples(Sequence[Any]):
    """A sequence of samples of a dataset, each of which is loaded every time it is read.

    Slicing loads nothing: if you split a batch into shards and read only some of them, only their samples are
    loaded.

    Args:
        dataset: The dataset of the samples.
        indices: The indices of the samples in their order; an index may occur more than once.
        fetched: The samples themselves if they were loaded in advance, one per index; `NOT_FETCHED` marks a
            sample that is loaded when it is read after all.
        streams: The random streams in which to load them, one per index; None to load them with the current
            states of the generators.

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
        # Ranges and tuples are immutable, and slicing them yields ranges and tuples again.
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
        # Indexing the range converts a negative position, which `_unfetched` could not slice with.
        return self._unfetched(range(len(self))[key]).fetch()[0]

    def __iter__(self) -> Iterator[Any]:
        if self.streams is not None:
            # All at once: the loop body must not draw from the stream of a sample, and setting the generators for
            # every sample separately is slow.
            return iter(self.fetch())
        # Not the iterator of `Sequence`, which would take an IndexError of the dataset for the end.
        return (self[position] for position in range(len(self)))

    @property
    def may_draw(self) -> bool:
        """Whether loading may draw from the generators of the process, so that it must not be repeated."""
        return self.streams is None and not draws_no_numbers(self.dataset)

    def __repr__(self) -> str:
        return f"Samples({type(self.dataset).__name__}, {self.indices})"

    def _unfetched(self, position: int) -> Samples:
        """Return the sample at one position, without what was loaded in advance."""
        streams = None if self.streams is None else self.streams[position : position + 1]
        return Samples(self.dataset, self.indices[position : position + 1], streams=streams)

    def fetch(self) -> list[Any]:
        """Load all samples; in one call if the dataset has ``__getitems__`` and there are no random streams.

        Samples that are loaded in one call cannot each have their own random stream.

        Raises:
            ValueError: If the dataset's ``__getitems__`` returned another number of samples than requested.
        """
        if self.fetched is not None:
            return [
                self._unfetched(position).fetch()[0] if sample is NOT_FETCHED else sample
                for position, sample in enumerate(self.fetched)
            ]
        if self.streams is not None:
            seeds = self.streams.seeds(self.indices)
            return load_in_streams(self.dataset.__getitem__, self.indices, seeds)
        if not isinstance(self.dataset, _BatchedDataset):
            return [self.dataset[index] for index in self.indices]
        samples = list(self.dataset.__getitems__(list(self.indices)))
        if len(samples) != len(self.indices):
            rule = f"must return one sample for each of the {len(self.indices)} indices"
            raise ValueError(f"`{type(self.dataset).__name__}.__getitems__` {rule}, got {len(samples)}.")
        return samples
