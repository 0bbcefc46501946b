"""Cut a batch into shards, give the shards to devices, and fix the order of their sum.

A shard is the unit of meaning: an update's result depends on how many shards there are. A
device is only a place where shards run. All three answers below are integer arithmetic,
so processes that are given the same numbers reach the same plan without a message.
`schedule` puts the first two together for the batches of one update; `slices` cuts the elements of the
gradients themselves, so that several threads can add them up.
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
"""Elements. A slice that starts at a multiple of this meets the same vector lanes as the whole tensor."""


def cut(num_samples: int, num_shards: int, *, strided: bool = False) -> list[range]:
    """Cut samples into contiguous shards, the first ``num_samples % num_shards`` one longer.

    Args:
        num_samples: How many samples there are, at least 1.
        num_shards: How many shards to cut, in 1..``num_samples``: no shard is empty.
        strided: Deal the samples round robin instead; the shards are as long as otherwise.

    Returns:
        The samples of each shard, in order.

    Raises:
        ValueError: A count is out of range.

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
    return _runs([size + (shard < longer) for shard in range(num_shards)])


def assign(num_shards: int, workloads: Sequence[float]) -> list[range]:
    """Give each device a run of neighbouring shards in proportion to its workload.

    The shares are those of the largest remainder, ties to the earlier device; then a device that
    came out empty takes a shard from the fullest one while there are shards for all.

    Args:
        num_shards: How many shards there are, at least 1.
        workloads: The relative speed of each device; positive and finite.

    Returns:
        The shards of each device, in order; empty runs only where devices outnumber shards.

    Raises:
        ValueError: There is no device, or a number is out of range.

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
    return _runs(counts)


def check_workloads(workloads: Sequence[float]) -> None:
    """Refuse workloads that are no relative speeds.

    Raises:
        ValueError: There are none, or one is not positive and finite.
    """
    if len(workloads) == 0:
        raise ValueError("`workloads` must hold at least one number, got none.")
    for index, workload in enumerate(workloads):
        if not (math.isfinite(workload) and workload > 0):
            raise ValueError(f"`workloads[{index}]` must be positive and finite, got {workload}.")


def merges(num_shards: int) -> list[list[tuple[int, int]]]:
    """List the additions that sum all shards into shard 0, level by level.

    A pair ``(into, other)`` reads "add ``other`` to ``into``". Pairs of one level touch
    different shards and may run at once, anywhere; the tree never depends on where.

    Args:
        num_shards: How many shards there are, at least 1.

    Raises:
        ValueError: There is no shard.

    >>> merges(5)
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    """
    if num_shards < 1:
        raise ValueError(f"`num_shards` must be at least 1, got {num_shards}.")
    strides = [2**level for level in range((num_shards - 1).bit_length())]
    return [[(into, into + stride) for into in range(0, num_shards - stride, 2 * stride)] for stride in strides]


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of an update.

    Attributes:
        index: Its leaf in the tree and its place in the random streams.
        batch: Which of the update's batches it is cut from.
        samples: Which samples of that batch: neighbours, or every so-manieth.
    """

    index: int
    batch: int
    samples: range


def schedule(
    batch_sizes: Sequence[int],
    num_shards: int | None,
    workloads: Sequence[float],
    *,
    strided: bool = False,
) -> list[list[Shard]]:
    """Cut the batches of one update into shards and give them to devices.

    With a number of shards, each batch is cut into that many (a batch with fewer samples into one a
    sample), shard i of batch b is leaf ``b·num_shards + i``, and the shards that exist are given out by
    `assign`. Without one, each device has one shard a batch, sized by its workload, and its leaves are
    neighbours.

    Args:
        batch_sizes: Samples in each batch, at least 1.
        num_shards: Shards a batch, at least 1, or None for one a device.
        workloads: The relative speed of each device; equal ones where each has one shard dealt round robin.
        strided: Deal the samples of a batch to its shards round robin, instead of cutting it into runs.

    Returns:
        The shards of each device in ascending order of index; empty where a device has nothing to do.

    >>> schedule([3], 2, workloads=[1])
    [[Shard(index=0, batch=0, samples=range(0, 2)), Shard(index=1, batch=0, samples=range(2, 3))]]
    """
    if num_shards is None:
        return _one_shard_a_device(batch_sizes, workloads, strided=strided)
    shards = [
        Shard(batch * num_shards + shard, batch, samples)
        for batch, size in enumerate(batch_sizes)
        for shard, samples in enumerate(cut(size, min(num_shards, size), strided=strided))
    ]
    return [shards[run.start : run.stop] for run in assign(len(shards), workloads)]


def _one_shard_a_device(batch_sizes: Sequence[int], workloads: Sequence[float], *, strided: bool) -> list[list[Shard]]:
    num_devices = len(workloads)
    parts = [_dealt(size, num_devices) if strided else assign(size, workloads) for size in batch_sizes]
    return [
        [
            Shard(device * len(batch_sizes) + batch, batch, parts[batch][device])
            for batch in range(len(batch_sizes))
            if parts[batch][device]
        ]
        for device in range(num_devices)
    ]


def _dealt(num_samples: int, num_devices: int) -> list[range]:
    """Deal samples round robin to devices; those that come too late for any get an empty range."""
    return [range(device, num_samples, num_devices) for device in range(num_devices)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one tensor.

    Attributes:
        tensor: The tensor's index.
        start: Its first element, a multiple of `ALIGNMENT`.
        stop: One past its last.
        whole: Whether that is all of the tensor.
    """

    tensor: int
    start: int
    stop: int
    whole: bool


def slices(sizes: Sequence[int], num_slices: int) -> list[list[Piece]]:
    """Cut tensors, laid end to end, into slices of about equal size at multiples of `ALIGNMENT`.

    Args:
        sizes: The number of elements of each tensor.
        num_slices: At least 1.

    Returns:
        The pieces of each slice. Elementwise work on them gives the bits of work on whole tensors.

    >>> slices([100, 28], 2)
    [[Piece(tensor=0, start=0, stop=64, whole=False)], [Piece(tensor=0, start=64, stop=100, whole=False), \
Piece(tensor=1, start=0, stop=28, whole=True)]]
    """
    offsets = list(accumulate((-(-size // ALIGNMENT) for size in sizes), initial=0))
    cuts = [offsets[-1] * index // num_slices for index in range(num_slices + 1)]
    return [list(_pieces(sizes, offsets, start, stop)) for start, stop in pairwise(cuts)]


def _pieces(sizes: Sequence[int], offsets: Sequence[int], start: int, stop: int) -> list[Piece]:
    """List what lies between two cuts, which count blocks of `ALIGNMENT` elements."""
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
    """Round each device's exact share down, then hand out the rest by the largest remainders."""
    speeds = [Fraction(workload) for workload in workloads]
    total = sum(speeds)
    shares = [num_shards * speed / total for speed in speeds]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda device: counts[device] - shares[device])
    for device in by_remainder[: num_shards - sum(counts)]:
        counts[device] += 1
    return counts


def _runs(counts: Sequence[int]) -> list[range]:
    """Lay runs of these lengths end to end."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
