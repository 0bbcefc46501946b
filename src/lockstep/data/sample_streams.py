"""Random numbers that belong to a sample: the same whoever loads it, when, and in whose company."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.streams import stream_seed

_SAMPLES: Final = 0x53414D504C4553
"""Sets the streams of samples apart from those of shards, which may have the same seed."""

_PLAIN: Final = frozenset({TensorDataset, torch.Tensor, list, tuple, str, range})


@final
@dataclass(frozen=True, slots=True)
class SampleStreams:
    """The random streams of some samples, each keyed by (seed, epoch, sample).

    While a sample is loaded, the three generators that datasets draw from by default are at the start
    of its stream: the CPU's default generator (or the thread's, inside a shard), Python's `random`, and
    NumPy's legacy generator ``numpy.random``. Afterwards they are where they were. A generator of
    the dataset's own, such as ``numpy.random.default_rng()``, is its own affair.

    Costs some 15 µs a sample, and 0.1 ms each time samples are loaded.

    Args:
        seed: Where the streams come from; any integer.
        num_samples: How many samples an epoch has.
        ordinals: For each sample, how many came before it since the run began.

    Determinism: which stream a sample has is integer arithmetic. Streams of a seed do not repeat within
    2³² samples. A sample that comes twice in one epoch has one stream.
    """

    seed: int
    num_samples: int
    ordinals: range

    def __getitem__(self, part: slice) -> SampleStreams:
        return replace(self, ordinals=self.ordinals[part])

    def seeds(self, indices: Sequence[int]) -> list[int]:
        """Give the seed of each sample's stream.

        >>> streams = SampleStreams(0, 10, range(8, 12))
        >>> streams.seeds([5, 6, 7, 8])[2:] == SampleStreams(0, 10, range(10, 12)).seeds([7, 8])
        True
        """
        seed = (self.seed << 64) + _SAMPLES
        return [
            stream_seed(seed, ordinal - ordinal % self.num_samples + index)
            for ordinal, index in zip(self.ordinals, indices, strict=True)
        ]


def draws_nothing(dataset: object) -> bool:
    """Tell whether a dataset surely holds ready samples, so that streams would be made for nothing.

    >>> draws_nothing(Subset(TensorDataset(torch.zeros(3)), [0, 2])), draws_nothing([object()])
    (True, True)
    """
    # Not `isinstance`: a subclass may do more to a sample than to index its tensors.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _PLAIN


def load_in_streams(load: Callable[[int], Any], indices: Sequence[int], seeds: Sequence[int]) -> list[Any]:
    """Load samples, each in the random stream of its seed, and leave the generators where they were.

    Args:
        load: Called with each index.
        indices: Which samples.
        seeds: Of their streams, in 0..2³²-1.
    """
    # Looked up late, for inside a shard the name means the thread's stream.
    generator: torch.Generator = torch.random.default_generator  # type: ignore[attr-defined]  # torch's gap
    numpy = sys.modules.get("numpy")
    ours, pythons = generator.get_state(), random.getstate()
    numpys = None if numpy is None else numpy.random.get_state()
    samples = []
    try:
        for index, seed in zip(indices, seeds, strict=True):
            generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            samples.append(load(index))
    finally:
        generator.set_state(ours)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)
    return samples


@final
@dataclass(frozen=True, slots=True)
class StreamedDataset:
    """A dataset whose samples are named by (index, seed of its stream), for workers to load.

    Args:
        dataset: Loads one sample by its index.
    """

    dataset: Any

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Load samples, each in its stream."""
        if not keys:
            return []
        indices, seeds = zip(*keys, strict=True)
        return load_in_streams(self.dataset.__getitem__, indices, seeds)
