"""Measure compute and transfer time per rank, and rebalance shards across ranks accordingly.

This is what ``workloads="auto"`` means over ranks. Where shards are cut changes no bit, so a clock may decide
it; but all ranks have to decide alike. So each tells the others what it has measured, and all adopt the
measurements at the first meeting where every rank has told them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch

from lockstep.plan import Shard
from lockstep.updaters.compute.cuts import cut_over_ranks, journeys, keeping_up, time_of
from lockstep.updaters.compute.device_timer import wait_for

WARM_UP: Final = 2
"""Attempts that are not measured: caches, kernels chosen at first use, connections."""
MEASURED: Final = 5
"""Attempts that are. The fastest counts: whatever else a machine does only ever adds to its time."""
AGAIN: Final = 10
"""Attempts are timed again once there were so many times more: a rank may have been busy, or become so."""
ALIKE: Final = 1.25
"""Ranks whose times lie within this ratio count as equally fast: clocks are noisy."""
WORTH: Final = 0.95
"""Another cut than that by workloads is taken if it promises at most this share of its time."""


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """What one rank has measured.

    Attributes:
        seconds: For one shard, while all its devices are at work; None where it had no shard.
        transfer: For sending all gradients once from one rank to another.
    """

    seconds: float | None
    transfer: float


@dataclass(frozen=True, slots=True)
class RankSpeeds:
    """How long shards take on each rank, and gradients between them.

    Attributes:
        seconds: For one shard, on each rank.
        transfer: For sending all gradients once from one rank to another.
    """

    seconds: tuple[float, ...]
    transfer: float

    @classmethod
    def measured(cls, measurements: Sequence[RankMeasurement], before: RankSpeeds | None) -> RankSpeeds:
        """Combine what all ranks have measured.

        Args:
            measurements: By each rank; some had a shard.
            before: Used for ranks that had none; without it, they count as being as fast as the others.
        """
        usual = fmean(each.seconds for each in measurements if each.seconds is not None)
        known = [usual] * len(measurements) if before is None else before.seconds
        seconds = [
            last if each.seconds is None else each.seconds for each, last in zip(measurements, known, strict=True)
        ]
        # A rank that came late to the sum found the others' bytes there, and measured too little.
        return cls(_levelled(seconds), max(each.transfer for each in measurements))

    def cut(
        self, leaves: Sequence[int], usual: Sequence[range], workloads: Sequence[Sequence[float]]
    ) -> Sequence[range]:
        """Return a run of shards for each rank: the usual ones, unless others are clearly faster.

        Args:
            leaves: The number in the tree of each shard that exists, ascending.
            usual: The runs by workloads alone, as positions in `leaves`.
            workloads: Those of each rank's devices.
        """
        other = cut_over_ranks(leaves, self.seconds, self.transfer, workloads)
        times = [time_of(runs, leaves, self.seconds, self.transfer, workloads) for runs in (usual, other)]
        return other if times[1] <= WORTH * times[0] else usual


def _levelled(seconds: Sequence[float]) -> tuple[float, ...]:
    """Give ranks that are about equally fast their mean.

    >>> _levelled([1.0, 3.0, 1.2])
    (1.1, 3.0, 1.1)
    """
    levels: list[list[float]] = []
    for each in sorted(seconds):
        if not levels or each > ALIKE * levels[-1][0]:
            levels.append([])
        levels[-1].append(each)
    means = {each: fmean(level) for level in levels for each in level}
    return tuple(means[each] for each in seconds)


class RankTimer:
    """Times the attempts of one rank by their moments, `begin`, `meet`, `sum` and `end`.

    An attempt that fails, or is to be made again, has no end and does not count.

    Args:
        measuring: Whether shards may be moved; else nothing is ever timed.
        clock: Returns seconds since some moment.
    """

    def __init__(self, *, measuring: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measuring = measuring
        """Whether attempts are being timed; the same on all ranks."""
        self.speeds: RankSpeeds | None = None
        """What the ranks have adopted last."""
        self._may_measure = measuring
        self._clock = clock
        self._meetings = 0
        self._next = 0
        self._begun = 0.0
        self._work = 0.0
        self._shards = 0.0
        self._attempts = 0
        self._seconds: list[float] = []
        self._transfers: list[float] = []

    def begin(self) -> None:
        """Note that an attempt begins."""
        if self.measuring:
            self._begun = self._clock()

    def meet(self, device: torch.device, runs: Sequence[Sequence[Shard]], workloads: Sequence[float]) -> None:
        """Note that this rank's share is computed, once the device has done it.

        Args:
            device: Where it is.
            runs: The shards of each of the rank's devices.
            workloads: Those of these devices.
        """
        if self.measuring:
            wait_for(device)
            self._work = self._clock() - self._begun
            self._shards = keeping_up([len(run) for run in runs], workloads)

    def sum(self) -> None:
        """Note that the sum over ranks begins."""
        if self.measuring:
            self._begun = self._clock()

    def end(self, device: torch.device, nodes: Sequence[int]) -> None:
        """Note that the sum over ranks is there, once the device has it.

        Args:
            device: Where it is.
            nodes: How many partial sums each rank brought.
        """
        if not self.measuring:
            return
        wait_for(device)
        seconds = self._clock() - self._begun
        self._attempts += 1
        if self._attempts > WARM_UP:
            self._transfers.append(seconds / journeys(nodes))
            if self._shards:
                self._seconds.append(self._work / self._shards)

    @property
    def measurement(self) -> RankMeasurement | None:
        """What to tell the other ranks; None as long as too little is measured."""
        if not self.measuring or len(self._transfers) < MEASURED:
            return None
        return RankMeasurement(min(self._seconds, default=None), min(self._transfers))

    def adopt(self, measurements: Sequence[RankMeasurement | None]) -> None:
        """Note what all ranks told at a meeting, and adopt it if each told something.

        What follows depends on how many meetings there were and on what was told there, so that all ranks
        do the same.
        """
        self._meetings += 1
        if self._meetings == self._next:
            self.measuring = True
        known = [each for each in measurements if each is not None]
        if self.measuring and len(known) == len(measurements):
            self.speeds = RankSpeeds.measured(known, self.speeds)
            self.measuring, self._next = False, AGAIN * self._meetings
            self._forget()

    def start_over(self) -> None:
        """Measure again from the next attempt on: devices of a rank share its shards in another way now."""
        self.measuring = self._may_measure
        self._forget()

    def _forget(self) -> None:
        self._attempts = 0
        self._seconds.clear()
        self._transfers.clear()
