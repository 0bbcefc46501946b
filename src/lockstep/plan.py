"""Cut a batch into shards, and assign the shards to devices.

The result of an update depends on the number of shards. A device is only where shards are computed and has no influence
on the result. Everything in this module is integer arithmetic (or exact fractions), so processes that start from the
same numbers arrive at the same plan without communicating.

`shards_by_device` combines `cut` and `assign` for the batches of one update. `slices` cuts the elements of the
gradients themselves, so that several threads can sum them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final

ALIGNMENT: Final = 64
"""Elements. A slice that starts at a multiple of this number falls on the same vector lanes as in the whole tensor, so
vectorized kernels round its elements in the same way."""


def cut(num_samples: int, num_shards: int, *, strided: bool = False) -> list[range]:
    """Cut samples into contiguous shards, of which the first ``num_samples % num_shards`` are one sample longer.

    Args:
        num_samples: The number of samples, at least 1.
        num_shards: The number of shards, in 1..``num_samples``, so that no shard is empty.
        strided: Whether to distribute the samples round robin instead. The lengths of the shards are the same.

    Returns:
        The samples of each shard, in order.

    Raises:
        ValueError: If a count is out of range.

    >>> cut(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    >>> [list(shard) for shard in cut(5, 2, strided=True)]
    [[0, 2, 4], [1, 3]]
    """
    if num_samples < 1:
        raise ValueError(f"`num_samples` must be at least 1, got {num_samples}.")
    if not 1 <= num_shards <= num_samples:
        rule = f"must lie in 1..`num_samples` (1..{num_samples})"
        raise ValueError(f"`num_shards` {rule}, got {num_shards}.")
    if strided:
        return [range(shard, num_samples, num_shards) for shard in range(num_shards)]
    size, longer = divmod(num_samples, num_shards)
    return _consecutive_ranges([size + (shard < longer) for shard in range(num_shards)])


def assign(num_shards: int, workloads: Sequence[float]) -> list[range]:
    """Assign to each device a run of consecutive shards in proportion to its workload.

    The number of shards per device is found by the largest remainder method, where ties go to the earlier device. After
    that, as long as there are enough shards for all devices, each device without a shard takes one from the device that
    has the most.

    Args:
        num_shards: The number of shards, at least 1.
        workloads: The relative speed of each device, positive and finite.

    Returns:
        The shards of each device, in order. A range is empty only if there are more devices than shards.

    Raises:
        ValueError: If there is no device, or if a number is out of range.

    >>> assign(8, workloads=[3, 1])
    [range(0, 6), range(6, 8)]
    >>> assign(3, workloads=[100, 1, 1])
    [range(0, 1), range(1, 2), range(2, 3)]
    """
    if num_shards < 1:
        raise ValueError(f"`num_shards` must be at least 1, got {num_shards}.")
    check_workloads(workloads)
    counts = _largest_remainders(num_shards, workloads)
    while 0 in counts and num_shards >= len(counts):
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return _consecutive_ranges(counts)


def check_workloads(workloads: Sequence[float]) -> None:
    """Check that workloads are relative speeds.

    Args:
        workloads: The relative speed of each device.

    Raises:
        TypeError: If they are no list of numbers.
        ValueError: If there is no workload, or if one is not positive and finite.
    """
    if isinstance(workloads, str | bytes) or not hasattr(workloads, "__len__"):
        raise TypeError(f"`workloads` must be a list of one number per device, got {workloads!r}.")
    if len(workloads) == 0:
        raise ValueError("`workloads` must hold at least one number, got none.")
    for index, workload in enumerate(workloads):
        if not hasattr(workload, "__float__"):
            raise TypeError(f"`workloads[{index}]` must be a number, got {workload!r}.")
        if not (math.isfinite(workload) and workload > 0):
            raise ValueError(f"`workloads[{index}]` must be positive and finite, got {workload}.")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of an update.

    Attributes:
        index: The number of the shard, which is its leaf in the tree and its position among the random streams.
        batch: The index of the batch, among the batches of the update, that the shard is cut from.
        samples: The samples of that batch: consecutive ones, or ones at a fixed stride.
    """

    index: int
    batch: int
    samples: range


def shards_by_device(
    batch_sizes: Sequence[int], num_shards: int | None, workloads: Sequence[float], *, strided: bool = False
) -> list[list[Shard]]:
    """Cut the batches of one update into shards and assign them to devices.

    If `num_shards` is given, each batch is cut into that many shards (a batch with fewer samples into one shard per
    sample), shard i of batch b is leaf ``b·num_shards + i``, and `assign` distributes the shards that exist. Otherwise
    each device gets one shard of each batch, sized by its workload, and the leaves of a device are consecutive.

    Args:
        batch_sizes: The number of samples in each batch, at least 1.
        num_shards: The number of shards per batch, at least 1, or None for one per device.
        workloads: The relative speed of each device. They must be equal if `num_shards` is None and `strided` is True.
        strided: Whether to distribute the samples of a batch to its shards round robin instead of cutting it into runs.

    Returns:
        The shards of each device in ascending order of index. The list of a device without work is empty.

    >>> shards_by_device([3], 2, workloads=[1])
    [[Shard(index=0, batch=0, samples=range(0, 2)), Shard(index=1, batch=0, samples=range(2, 3))]]
    """
    if num_shards is None:
        return _one_per_device(batch_sizes, workloads, strided=strided)
    shards = [
        Shard(batch * num_shards + shard, batch, samples)
        for batch, size in enumerate(batch_sizes)
        for shard, samples in enumerate(cut(size, min(num_shards, size), strided=strided))
    ]
    # Whole runs of neighbors keep complete subtrees on one device, so few partial sums have to be exchanged.
    return [shards[run.start : run.stop] for run in assign(len(shards), workloads)]


def _one_per_device(batch_sizes: Sequence[int], workloads: Sequence[float], *, strided: bool) -> list[list[Shard]]:
    num_devices = len(workloads)
    parts = [_round_robin(size, num_devices) if strided else assign(size, workloads) for size in batch_sizes]
    return [
        [
            # Numbered by device first, so that the leaves of a device are consecutive and it can sum its own batches.
            Shard(device * len(batch_sizes) + batch, batch, parts[batch][device])
            for batch in range(len(batch_sizes))
            if parts[batch][device]
        ]
        for device in range(num_devices)
    ]


def _round_robin(num_samples: int, num_devices: int) -> list[range]:
    """Distribute samples to devices round robin. If there are fewer samples than devices, the last ranges are empty."""
    return [range(device, num_samples, num_devices) for device in range(num_devices)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of elements of one tensor.

    Attributes:
        tensor: The index of the tensor.
        start: The first element, a multiple of `ALIGNMENT`.
        stop: The element after the last one.
        whole: Whether the range covers the whole tensor.
    """

    tensor: int
    start: int
    stop: int
    whole: bool


def slices(sizes: Sequence[int], num_slices: int) -> list[list[Piece]]:
    """Cut tensors, laid end to end, into slices of about equal size at multiples of `ALIGNMENT`.

    Args:
        sizes: The number of elements of each tensor.
        num_slices: The number of slices, at least 1.

    Returns:
        The pieces of each slice. An elementwise operation on the pieces gives the same bits as one on whole tensors.

    >>> [[(piece.tensor, piece.start, piece.stop) for piece in each] for each in slices([100, 28], 2)]
    [[(0, 0, 64)], [(0, 64, 100), (1, 0, 28)]]
    """
    # In blocks of `ALIGNMENT` elements. Every tensor starts a new block, so that the blocks are aligned within it.
    offsets = list(accumulate((-(-size // ALIGNMENT) for size in sizes), initial=0))
    cuts = [offsets[-1] * index // num_slices for index in range(num_slices + 1)]
    return [list(_pieces(sizes, offsets, start, stop)) for start, stop in pairwise(cuts)]


def _pieces(sizes: Sequence[int], offsets: Sequence[int], start: int, stop: int) -> list[Piece]:
    """List the pieces between two cuts, which are counted in blocks of `ALIGNMENT` elements."""
    pieces = []
    tensor = bisect_right(offsets, start) - 1
    while tensor < len(sizes) and offsets[tensor] < stop:
        first = max(start - offsets[tensor], 0) * ALIGNMENT
        last = min((stop - offsets[tensor]) * ALIGNMENT, sizes[tensor])
        if first < last:
            pieces.append(Piece(tensor, first, last, whole=last - first == sizes[tensor]))
        tensor += 1
    return pieces


def _largest_remainders(num_shards: int, workloads: Sequence[float]) -> list[int]:
    """Round the exact share of each device down, then distribute the remaining shards by largest remainder."""
    # Fractions are exact, so equal remainders compare equal and ties go to the earlier device.
    speeds = [Fraction(workload) for workload in workloads]
    total = sum(speeds)
    shares = [num_shards * speed / total for speed in speeds]
    counts = [math.floor(share) for share in shares]
    # The most negative difference is the largest remainder. `sorted` is stable, so ties go to the earlier device.
    by_remainder = sorted(range(len(shares)), key=lambda device: counts[device] - shares[device])
    for device in by_remainder[: num_shards - sum(counts)]:
        counts[device] += 1
    return counts


def _consecutive_ranges(counts: Sequence[int]) -> list[range]:
    """Return consecutive ranges of the given lengths, starting at 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
