"""Samples of a dataset, identified by index and loaded when they are read."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, final, overload, runtime_checkable

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.elsewhere import missing_attribute
from lockstep.streams import restored_generators, seed_default_generators, stream_seed

_SAMPLE_TAG: Final = 0x53414D504C4553
"""Separates the streams of samples from those of shards, which may have the same seed."""

_STORED_DATASETS: Final = frozenset({TensorDataset, torch.Tensor, list, tuple, str, range})


@dataclass(frozen=True, slots=True)
class SampleStreams:
    """The random streams of some samples, each keyed by (seed, epoch, sample).

    While a sample is loaded, the three generators that datasets use by default are at the start of its stream:
    the CPU's default generator (within a shard, the generator of the thread), Python's `random`, and NumPy's legacy
    generator ``numpy.random``. Afterwards their previous states are restored. Generators of the dataset's own, such
    as ``numpy.random.default_rng()``, are not affected.

    It costs about 15 µs per sample, and 0.1 ms each time samples are loaded.

    Args:
        seed: The seed of the streams; any integer.
        num_samples: The number of samples per epoch.
        ordinals: For each sample, the number of samples before it since the start of the run.

    Determinism: the stream of a sample is determined by integer arithmetic. The streams of one seed do not
    repeat within 2³² samples. A sample that occurs twice in one epoch has the same stream both times.
    """

    seed: int
    num_samples: int
    ordinals: range

    def __getitem__(self, part: slice) -> SampleStreams:
        return replace(self, ordinals=self.ordinals[part])

    def keys(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return the index of each sample with the seed of its stream, as a `StreamedDataset` takes them.

        >>> streams = SampleStreams(0, 10, range(8, 12))
        >>> streams.keys([5, 6, 7, 8])[2:] == SampleStreams(0, 10, range(10, 12)).keys([7, 8])
        True
        """
        seed = (self.seed << 64) + _SAMPLE_TAG
        # Keyed by the epoch and the index of the sample, and not by its position in the order.
        return [
            (index, stream_seed(seed, ordinal - ordinal % self.num_samples + index))
            for ordinal, index in zip(self.ordinals, indices, strict=True)
        ]


def draws_no_numbers(dataset: object) -> bool:
    """Return whether a dataset is known to store its samples, so that it needs no random streams.

    >>> draws_no_numbers(Subset(TensorDataset(torch.zeros(3)), [0, 2])), draws_no_numbers([object()])
    (True, True)
    """
    # Not `isinstance`: a subclass may transform the samples that it indexes.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _STORED_DATASETS


@dataclass(frozen=True, slots=True)
class StreamedDataset:
    """A dataset whose keys are pairs (index, seed of the stream in 0..2³²-1), so that workers need no other state.

    Args:
        dataset: The dataset that loads a sample by its index.
    """

    dataset: Any

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Load samples, each with its random stream, and restore the generators afterwards."""
        samples = []
        with restored_generators():
            for index, seed in keys:
                seed_default_generators(seed)
                samples.append(self.dataset[index])
        return samples


NOT_FETCHED: Final = object()
"""A placeholder for a sample that was not loaded in advance, because this process was not expected to read it."""


@runtime_checkable
class MapDataset(Protocol):
    """A dataset with a length whose samples are accessed by index, like `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Load one sample."""


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

    if not TYPE_CHECKING:  # checkers of types know which attributes there are

        def __getattr__(self, name: str) -> Any:
            """Raise an error that says how to get a list, which functions of other libraries take."""
            raise missing_attribute(self, name, dict.fromkeys([name], "Pass list(samples) where a list is expected."))

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
        return replace(self, fetched=None)[position : position + 1]

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
            return StreamedDataset(self.dataset).__getitems__(self.streams.keys(self.indices))
        dataset: Any = self.dataset
        # A method of the class, and not one of another dataset that it passes on.
        if not hasattr(type(dataset), "__getitems__"):
            return [dataset[index] for index in self.indices]
        samples = list(dataset.__getitems__(list(self.indices)))
        if len(samples) != len(self.indices):
            rule = f"must return one sample for each of the {len(self.indices)} indices"
            raise ValueError(f"`{type(self.dataset).__name__}.__getitems__` {rule}, got {len(samples)}.")
        return samples
