"""Measure compute and transfer time per rank, and rebalance shards across ranks accordingly.

This implements ``workloads="auto"`` over ranks. Where shards are cut does not change the result, so a clock may decide
it, but all ranks must decide alike. So each rank sends its measurement to the others, and all adopt the measurements in
the first exchange in which every rank has sent one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch

from lockstep.plan import Shard
from lockstep.updaters.compute.cuts import cut_over_ranks, equivalent_shards, transfers_per_element, update_seconds
from lockstep.updaters.compute.device_timer import synchronize

UNTIMED_ATTEMPTS: Final = 2
"""The number of attempts before the first timed one, in which caches fill, kernels are chosen and connections open."""
TIMED_ATTEMPTS: Final = 5
"""The number of attempts that are timed. The fastest counts, because other load on a machine only adds time."""
REMEASURE_FACTOR: Final = 10
"""Ranks are timed again once the number of exchanges has grown by this factor: their load may have changed."""
SAME_SPEED_RATIO: Final = 1.25
"""Ranks whose times lie within this ratio count as equally fast, because clocks are noisy."""
WORTHWHILE_SHARE: Final = 0.95
"""Another cut than that by workloads is used if its predicted time is at most this share of the other."""


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """The times that one rank has measured.

    Attributes:
        seconds: The time for one shard while all devices of the rank work; None if the rank had no shard.
        transfer: The time for sending all gradients once from one rank to another, in seconds.
    """

    seconds: float | None
    transfer: float


@dataclass(frozen=True, slots=True)
class RankSpeeds:
    """The speeds of all ranks and of the transfers between them.

    Attributes:
        seconds: The time for one shard on each rank.
        transfer: The time for sending all gradients once from one rank to another, in seconds.
    """

    seconds: tuple[float, ...]
    transfer: float

    @classmethod
    def from_measurements(cls, measurements: Sequence[RankMeasurement], previous: RankSpeeds | None) -> RankSpeeds:
        """Combine the measurements of all ranks.

        Args:
            measurements: The measurement of each rank; at least one rank had a shard.
            previous: The speeds to use for ranks that had no shard. Without them, these ranks count as average.
        """
        usual = fmean(each.seconds for each in measurements if each.seconds is not None)
        known = [usual] * len(measurements) if previous is None else previous.seconds
        seconds = [
            last if each.seconds is None else each.seconds for each, last in zip(measurements, known, strict=True)
        ]
        # A rank that is late to the sum finds the bytes of the others already there and measures too short a time, so
        # the longest transfer time is the one to use.
        return cls(_group_similar(seconds), max(each.transfer for each in measurements))

    def cut(
        self, leaves: Sequence[int], usual: Sequence[range], workloads: Sequence[Sequence[float]]
    ) -> Sequence[range]:
        """Return a run of shards for each rank: the usual runs, unless others are clearly faster.

        Args:
            leaves: The numbers of the existing shards in the tree, in ascending order.
            usual: The runs by workloads alone, as positions in `leaves`.
            workloads: The workloads of each rank's devices.
        """
        other = cut_over_ranks(leaves, self.seconds, self.transfer, workloads)
        times = [update_seconds(runs, leaves, self.seconds, self.transfer, workloads) for runs in (usual, other)]
        return other if times[1] <= WORTHWHILE_SHARE * times[0] else usual


def _group_similar(seconds: Sequence[float]) -> tuple[float, ...]:
    """Replace the times of ranks that are about equally fast by their mean.

    >>> _group_similar([1.0, 3.0, 1.2])
    (1.1, 3.0, 1.1)
    """
    # Noise between equal ranks would otherwise cut batches unevenly, and differently after each measurement.
    levels: list[list[float]] = []
    for each in sorted(seconds):
        if not levels or each > SAME_SPEED_RATIO * levels[-1][0]:
            levels.append([])
        levels[-1].append(each)
    means = {each: fmean(level) for level in levels for each in level}
    return tuple(means[each] for each in seconds)


class RankTimer:
    """Times the attempts of one rank by calls of `start_attempt`, `end_compute`, `start_sum` and `end_sum`.

    An attempt that fails or is repeated never reaches `end_sum` and does not count.

    Args:
        measuring: Whether shards may be moved. If not, nothing is ever timed.
        clock: Returns the seconds since an arbitrary moment.
    """

    def __init__(self, *, measuring: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measuring = measuring
        """Whether attempts are being timed; the same on all ranks."""
        self.speeds: RankSpeeds | None = None
        """The speeds that the ranks adopted last; None before the first time."""
        self._may_measure = measuring
        self._clock = clock
        self._exchanges = 0
        self._remeasure_at = 0
        self._begun = 0.0
        self._work = 0.0
        self._shards = 0.0
        self._attempts = 0
        self._seconds: list[float] = []
        self._transfers: list[float] = []

    def start_attempt(self) -> None:
        """Start the clock for the shards of an attempt."""
        if self.measuring:
            self._begun = self._clock()

    def end_compute(self, device: torch.device, runs: Sequence[Sequence[Shard]], workloads: Sequence[float]) -> None:
        """Stop the clock once the device has computed this rank's share.

        Args:
            device: The device that the partial sums are on.
            runs: The shards of each of the rank's devices.
            workloads: The workloads of these devices.
        """
        # Only while measuring: waiting for the device would slow every later update down.
        if self.measuring:
            synchronize(device)
            self._work = self._clock() - self._begun
            self._shards = equivalent_shards([len(run) for run in runs], workloads)

    def start_sum(self) -> None:
        """Start the clock for the sum over ranks."""
        if self.measuring:
            self._begun = self._clock()

    def end_sum(self, device: torch.device, nodes: Sequence[int]) -> None:
        """Stop the clock once the device has the sum over ranks.

        Args:
            device: The device that the sum is on.
            nodes: The number of partial sums that each rank contributed.
        """
        if not self.measuring:
            return
        synchronize(device)
        # Both times are recorded here and not in `end_compute`, so that only complete attempts count.
        seconds = self._clock() - self._begun
        self._attempts += 1
        if self._attempts > UNTIMED_ATTEMPTS:
            self._transfers.append(seconds / transfers_per_element(nodes))
            if self._shards:
                self._seconds.append(self._work / self._shards)

    @property
    def measurement(self) -> RankMeasurement | None:
        """The measurement to send to the other ranks; None until enough attempts are timed."""
        if not self.measuring or len(self._transfers) < TIMED_ATTEMPTS:
            return None
        return RankMeasurement(min(self._seconds, default=None), min(self._transfers))

    def adopt(self, measurements: Sequence[RankMeasurement | None]) -> None:
        """Adopt the measurements that all ranks sent in one exchange, if each sent one.

        What follows depends only on the number of exchanges and on what was sent in them, so all ranks do the same.

        Args:
            measurements: The measurement of each rank, None for a rank that has too few.
        """
        # Counted by exchanges and not by local attempts, of which ranks may have made different numbers.
        self._exchanges += 1
        if self._exchanges == self._remeasure_at:
            self.measuring = True
        known = [each for each in measurements if each is not None]
        if self.measuring and len(known) == len(measurements):
            self.speeds = RankSpeeds.from_measurements(known, self.speeds)
            self.measuring, self._remeasure_at = False, REMEASURE_FACTOR * self._exchanges
            self._forget()

    def restart(self) -> None:
        """Measure again from the next attempt on, because the devices of a rank have got other workloads."""
        self.measuring = self._may_measure
        self._forget()

    def _forget(self) -> None:
        self._attempts = 0
        self._seconds.clear()
        self._transfers.clear()
