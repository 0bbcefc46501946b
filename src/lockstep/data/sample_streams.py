"""Random numbers per sample, which do not depend on which process loads it, when, or with which other samples."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.streams import restored_generators, stream_seed

_SAMPLE_TAG: Final = 0x53414D504C4553
"""Separates the streams of samples from those of shards, which may have the same seed."""

_STORED_DATASETS: Final = frozenset({TensorDataset, torch.Tensor, list, tuple, str, range})


@final
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

    def seeds(self, indices: Sequence[int]) -> list[int]:
        """Return the seed of the stream of each sample.

        >>> streams = SampleStreams(0, 10, range(8, 12))
        >>> streams.seeds([5, 6, 7, 8])[2:] == SampleStreams(0, 10, range(10, 12)).seeds([7, 8])
        True
        """
        seed = (self.seed << 64) + _SAMPLE_TAG
        # Keyed by the epoch and the index of the sample, and not by its position in the order.
        return [
            stream_seed(seed, ordinal - ordinal % self.num_samples + index)
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


def load_in_streams(load: Callable[[int], Any], indices: Sequence[int], seeds: Sequence[int]) -> list[Any]:
    """Load samples, each with the random stream of its seed, and restore the generators afterwards.

    Args:
        load: A function that returns the sample of an index.
        indices: The indices of the samples.
        seeds: The seeds of their streams, in 0..2³²-1.
    """
    # Looked up here and not at import, because within a shard the name refers to the stream of the thread.
    generator: torch.Generator = torch.random.default_generator  # type: ignore[attr-defined]  # torch's gap
    numpy = sys.modules.get("numpy")
    samples = []
    with restored_generators():
        for index, seed in zip(indices, seeds, strict=True):
            generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            samples.append(load(index))
    return samples


@final
@dataclass(frozen=True, slots=True)
class StreamedDataset:
    """A dataset whose keys are pairs (index, seed of the stream), so that workers need no other state.

    Args:
        dataset: The dataset that loads a sample by its index.
    """

    dataset: Any

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Load samples, each with its random stream."""
        if not keys:
            return []
        indices, seeds = zip(*keys, strict=True)
        return load_in_streams(self.dataset.__getitem__, indices, seeds)
