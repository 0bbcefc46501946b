"""Measure how long shards take on each rank and gradients between them, and cut shards over ranks by that.

Where shards are cut changes no bit, so a clock may decide it; but all ranks have to decide alike. So each
tells the others what it has measured, and all settle at the first meeting where everybody has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import Final

import torch

from lockstep.communicators.cuts import cut_over_ranks, journeys, keeping_up, time_of
from lockstep.plan import Shard
from lockstep.updaters.balance import wait_for

WARM_UP: Final = 2
"""Tries that are not measured: caches, kernels chosen at first use, connections."""
MEASURED: Final = 5
"""Tries that are. The fastest counts: whatever else a machine does only ever adds to its time."""
AGAIN: Final = 10
"""Tries are timed again once there were so many times more: a rank may have been busy, or become so."""
ALIKE: Final = 1.25
"""Ranks whose times lie within this ratio count as equally fast: clocks are noisy."""
WORTH: Final = 0.95
"""Another cut than that by work loads is taken if it promises at most this share of its time."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has measured.

    Attributes:
        seconds: For one shard, while all its places are at work; None where it had no shard.
        transfer: For sending all gradients once from one rank to another.
    """

    seconds: float | None
    transfer: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How long shards take on each rank, and gradients between them.

    Attributes:
        seconds: For one shard, on each rank.
        transfer: For sending all gradients once from one rank to another.
        by_workloads: Whether the work loads say how fast the ranks are beside each other: they are the
            user's. Then only the mean of `seconds` counts.
    """

    seconds: tuple[float, ...]
    transfer: float
    by_workloads: bool = False

    @classmethod
    def settled(cls, told: Sequence[Told], *, before: Pace | None, by_workloads: bool) -> Pace:
        """Make one pace of what all ranks have measured.

        Args:
            told: By each rank; some had a shard.
            before: What counts for ranks that had none; without it, they are as fast as the others.
            by_workloads: See `Pace`.
        """
        usual = fmean(each.seconds for each in told if each.seconds is not None)
        known = [usual] * len(told) if before is None else before.seconds
        seconds = [
            last if each.seconds is None else each.seconds for each, last in zip(told, known, strict=True)
        ]
        # A rank that came late to the sum found the others' bytes there, and measured too little.
        return cls(_levelled(seconds), max(each.transfer for each in told), by_workloads)

    def cut(
        self, leaves: Sequence[int], usual: Sequence[range], places: Sequence[Sequence[float]]
    ) -> Sequence[range]:
        """Give each rank a run of shards: the usual one, unless another is clearly faster.

        Args:
            leaves: The number in the tree of each shard that exists, ascending.
            usual: The runs by work loads alone, as positions in `leaves`.
            places: The work loads of each rank's places.
        """
        seconds = self._seconds([fsum(speeds) for speeds in places])
        other = cut_over_ranks(leaves, seconds, self.transfer, places)
        times = [time_of(runs, leaves, seconds, self.transfer, places) for runs in (usual, other)]
        return other if times[1] <= WORTH * times[0] else usual

    def _seconds(self, speeds: Sequence[float]) -> Sequence[float]:
        """Give the time of a shard on each rank."""
        if not self.by_workloads:
            return self.seconds
        unit = fmean(each * speed for each, speed in zip(self.seconds, speeds, strict=True))
        return [unit / speed for speed in speeds]


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


class Pacer:
    """Times tries of one rank by their moments, `begin`, `meet`, `sum` and `end`, until all ranks settle.

    A try that fails, or is to be made anew, has no end and does not count.

    Args:
        movable: Whether shards may be moved; else there is nothing to time, and nothing is ever settled.
        by_workloads: See `Pace`.
        clock: Gives seconds since some moment.
    """

    def __init__(
        self, *, movable: bool, by_workloads: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.measuring = movable
        """Whether tries are being timed; the same on all ranks."""
        self.pace: Pace | None = None
        """What the ranks have settled on last."""
        self._by_workloads = by_workloads
        self._clock = clock
        self._meetings = 0
        self._next = 0
        self._begun = 0.0
        self._work = 0.0
        self._shards = 0.0
        self._tries = 0
        self._seconds: list[float] = []
        self._transfers: list[float] = []

    def begin(self) -> None:
        """Take note that a try begins."""
        if self.measuring:
            self._begun = self._clock()

    def meet(self, device: torch.device, runs: Sequence[Sequence[Shard]], speeds: Sequence[float]) -> None:
        """Take note that this rank's part is computed, once the device has done it.

        Args:
            device: Where it is.
            runs: The shards of each of its places.
            speeds: The work loads of these.
        """
        if self.measuring:
            wait_for(device)
            self._work = self._clock() - self._begun
            self._shards = keeping_up([len(run) for run in runs], speeds)

    def sum(self) -> None:
        """Take note that the sum over ranks begins."""
        if self.measuring:
            self._begun = self._clock()

    def end(self, device: torch.device, nodes: Sequence[int]) -> None:
        """Take note that the sum over ranks is there, once the device has it.

        Args:
            device: Where it is.
            nodes: How many partial sums each rank brought.
        """
        if not self.measuring:
            return
        wait_for(device)
        seconds = self._clock() - self._begun
        self._tries += 1
        if self._tries > WARM_UP:
            self._transfers.append(seconds / journeys(nodes))
            if self._shards:
                self._seconds.append(self._work / self._shards)

    @property
    def told(self) -> Told | None:
        """What is to be told to the other ranks; None as long as that is too little."""
        if not self.measuring or len(self._transfers) < MEASURED:
            return None
        return Told(min(self._seconds, default=None), min(self._transfers))

    def settle(self, told: Sequence[Told | None]) -> None:
        """Take note of what all ranks told at a meeting, and settle if each told something.

        What follows depends on how many meetings there were and on what was told there, so that all ranks
        do the same.
        """
        self._meetings += 1
        if self._meetings == self._next:
            self.measuring = True
        known = [each for each in told if each is not None]
        if self.measuring and len(known) == len(told):
            self.pace = Pace.settled(known, before=self.pace, by_workloads=self._by_workloads)
            self.measuring, self._next, self._tries = False, AGAIN * self._meetings, 0
            self._seconds.clear()
            self._transfers.clear()
