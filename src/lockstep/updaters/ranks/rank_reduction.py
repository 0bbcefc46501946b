"""Reduce what the devices of all ranks computed, so that every rank holds the gradient of the whole batch."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.communicators import Communicator
from lockstep.replicas import BufferRef
from lockstep.updaters.attempt import Attempt
from lockstep.updaters.compute import RankTimer, ShardAssignment
from lockstep.updaters.ranks import rank_sum
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.coordinator import Position, RankCoordinator
from lockstep.updaters.ranks.rank_buffers import RankBuffers, sum_buffers
from lockstep.updaters.ranks.rank_report import RankReport
from lockstep.updaters.ranks.rank_sum import RankSum
from lockstep.updaters.ranks.same_batches import BATCHES, Described, describe_batch
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.setup import MAIN

LOG = logging.getLogger("lockstep")


class RankReduction:
    """Reduces over ranks, at the meeting in which they tell each other what there is.

    Args:
        communicator: Joins the ranks.
        coordinator: Where they meet.
        rank_sum: Sums their gradients.
        workloads: The relative speeds of the devices of every rank.
        timer: Times the ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        coordinator: RankCoordinator,
        rank_sum: RankSum,
        workloads: Sequence[Sequence[float]],
        timer: RankTimer,
    ) -> None:
        self._communicator = communicator
        self._watch = communicator.watch
        self.coordinator = coordinator
        self._sum = rank_sum
        self._timer = timer
        self._was_steady = False
        self._batches: list[Described] = []
        self._workloads = list(workloads)
        self._assign()

    def _assign(self) -> None:
        rank, known = self._communicator.rank, tuple(map(tuple, self._workloads))
        self.assignment = ShardAssignment(known[:rank], known[rank + 1 :], self._timer.speeds)
        """The devices of the other ranks, as of the last meeting."""
        self.workloads = known[rank]
        """Those of this rank's devices, as the others know them."""

    def begin(self, attempt: Attempt, update: int) -> None:
        """Note that the shards of an attempt are about to be computed, and describe its batches.

        Args:
            attempt: The attempt, with its batches.
            update: The number of updates that are done.
        """
        name = "" if attempt.given_batches else MAIN
        # What a step function has drawn comes first, so that an error names the iterator if it can.
        self._batches = [*attempt.request.drawn, *(describe_batch(each, name, update) for each in attempt.batches)]
        self._timer.begin()

    def watch_backward(self, attempt: Attempt, position: Position, like: Sequence[torch.Tensor]) -> None:
        """Let gradients be sent while backward still computes others, where that can be.

        Args:
            attempt: Whose shards are about to be computed.
            position: What must be the same on all ranks.
            like: Tensors of the shapes, dtypes and devices of the gradients.
        """
        complete = len(attempt.work) == 1 and attempt.task.precision.held_dtype is None
        key = json.dumps([position["computation"], position["batch sizes"]]) if complete else None
        attempt.task.receiver = self._sum.begin(key, attempt.share, like)

    def reduce(
        self,
        attempt: Attempt,
        *,
        position: Position,
        again: bool,
        workloads: Sequence[float],
        like: Sequence[torch.Tensor],
        slots: Sequence[BufferRef],
    ) -> None:
        """Meet, and sum what the devices of all ranks have computed.

        Args:
            attempt: Gets the sums, not divided yet; it is not complete where a rank has to compute its share
                again.
            position: What must be the same on all ranks.
            again: Whether shards of this rank were left out.
            workloads: Of this rank's devices, from the next attempt on.
            like: Tensors of the shapes, dtypes and devices of the gradients.
            slots: The model's buffers.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else.
            PeerInterrupt: A rank was interrupted.
        """
        devices, share, timer, home = attempt.devices, attempt.share, self._timer, like[0].device
        gradients = self._sum.announce([each.gradients.partials for each in devices], share)
        buffers = RankBuffers.of(devices, share, slots) if slots else RankBuffers()
        timer.meet(home, share.runs, self.workloads)
        shards: list[ShardReport] = []
        samples = 0
        for device in devices:
            shards += device.reports
            samples += device.samples
        report = RankReport(
            shards,
            samples,
            gradients,
            buffers.contribution,
            buffers.weights,
            workloads,
            timer.measurement,
        )
        self._watch.doing = "reduce"
        # All of the attempt is computed by now, but nothing is summed: ranks with other batches raise here.
        told = self.coordinator.meet({**position, BATCHES: self._batches}, report.to_plain(), again=again)
        attempt.complete = told is not None
        if told is not None:
            reports = list(map(RankReport.from_plain, told))
            self._take(attempt, reports, timed=position["computation"] == 0, home=home)
            attempt.buffers = [sum_buffers(self._communicator, buffers, reports, slots)] if slots else []
        self.coordinator.part()

    def _take(self, attempt: Attempt, reports: Sequence[RankReport], *, timed: bool, home: torch.device) -> None:
        """Put into the attempt what all ranks have computed.

        Args:
            attempt: The attempt.
            reports: Of all ranks.
            timed: Whether the time that it takes counts; a search, or another network, takes its own.
            home: The device of the sums.
        """
        attempt.reports, attempt.samples = [], 0
        contributions, steady = [], self._adopt(reports)
        for report in reports:
            attempt.reports += report.shards
            attempt.samples += report.samples
            contributions.append(report.gradients)
            steady &= len(report.workloads) == 1
        self._timer.sum()
        # Not divided on the way: every rank divides and checks in one pass over the memory.
        attempt.gradients = self._sum.sum(tuple(contributions), steady=steady)
        if timed:
            self._timer.end(home, [len(each.shards) for each in contributions])

    def _adopt(self, reports: Sequence[RankReport]) -> bool:
        """Take over what all ranks told of their speeds, and return whether shards stay where they are."""
        timer, before = self._timer, self.assignment.speeds
        measurements, workloads = [], []
        for report in reports:
            measurements.append(report.measurement)
            workloads.append(report.workloads)
        timer.adopt(measurements)
        steady = workloads == self._workloads and timer.speeds == before
        if workloads != self._workloads:
            timer.start_over()
        if not steady:
            self._workloads = workloads
            self._assign()
        steady &= not timer.measuring
        if steady and not self._was_steady and self._communicator.rank == 0:
            LOG.info("Shards on each rank: %s.", " + ".join(str(len(each.shards)) for each in reports))
        self._was_steady = steady
        return steady

    def gather_nonfinite(self, found: Sequence[NonFiniteShard]) -> list[NonFiniteShard]:
        """Return to every rank what each found."""
        rows = [[each.shard, each.batch, _ends(each.samples), each.loss, each.parameter] for each in found]
        return [
            NonFiniteShard(shard, batch, range(*samples), loss, parameter)
            for message in self._communicator.exchange(json.dumps(rows).encode())
            for shard, batch, samples, loss, parameter in json.loads(message)
        ]


def join_ranks(
    communicator: Communicator,
    workloads: Sequence[float],
    alike: RankConsistency,
    *,
    movable: bool,
    measured: bool,
) -> RankReduction | None:
    """Get to know the devices of all ranks; every rank calls it.

    Args:
        communicator: Joins them.
        workloads: The relative speeds of this rank's devices.
        alike: Compares the ranks when they meet.
        movable: Whether the result is the same wherever shards are computed.
        measured: Whether workloads are to be measured, and those of the ranks with them.

    Returns:
        What reduces over them; None for a process that is alone.

    Raises:
        ValueError: Workloads are to be measured on some ranks only.
    """
    if communicator.size == 1:
        return None
    own = [list(workloads), movable and communicator.exact, measured, machine()]
    told = [json.loads(each) for each in communicator.exchange(json.dumps(own).encode())]
    known, free, wanted, machines = zip(*told, strict=True)
    for rank, each in enumerate(wanted):
        if each != wanted[0]:
            raise ValueError(
                f'`workloads` must be "auto" on every rank or on none, got it on rank {rank if each else 0} '
                f"and not on rank {0 if each else rank}. Ranks are only timed beside each other; give all of "
                'them "auto", or each of them numbers.'
            )
    timer = RankTimer(measuring=all(free) and all(wanted))
    total = RankSum(communicator, rank_sum.DEFAULTS, one_machine=len(set(machines)) == 1)
    return RankReduction(communicator, RankCoordinator(communicator, alike, total), total, known, timer)


def machine() -> str:
    """Name this machine; a network namespace of Linux counts as one, for it reaches others by a network."""
    name = socket.gethostname()
    namespace = Path("/proc/self/ns/net")
    return f"{name}, {namespace.readlink()}" if namespace.is_symlink() else name


def _ends(samples: range) -> tuple[int, int, int]:
    return samples.start, samples.stop, samples.step
