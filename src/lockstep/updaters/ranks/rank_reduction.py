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
from lockstep.updaters.result import NonFiniteShard, ShardReport

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
        self._workloads = list(workloads)
        self._assign()

    def _assign(self) -> None:
        rank, known = self._communicator.rank, tuple(map(tuple, self._workloads))
        self.assignment = ShardAssignment(known[:rank], known[rank + 1 :], self._timer.speeds)
        """The devices of the other ranks, as of the last meeting."""
        self.workloads = known[rank]
        """Those of this rank's devices, as the others know them."""

    def start_attempt(self) -> None:
        """Note that the shards of an attempt are about to be computed."""
        self._timer.start_attempt()

    def begin_early_send(self, attempt: Attempt, position: Position, like: Sequence[torch.Tensor]) -> None:
        """Let gradients be sent while backward still computes others, where that can be.

        Args:
            attempt: Whose shards are about to be computed.
            position: What must be the same on all ranks.
            like: Tensors of the shapes, dtypes and devices of the gradients.
        """
        complete = len(attempt.device_shards) == 1 and attempt.task.precision.held_dtype is None
        key = json.dumps([position["computation"], position["batch sizes"]]) if complete else None
        attempt.task.early_receiver = self._sum.begin_sum(key, attempt.share, like)

    def reduce(
        self,
        attempt: Attempt,
        *,
        position: Position,
        repeat: bool,
        workloads: Sequence[float],
        like: Sequence[torch.Tensor],
        buffer_refs: Sequence[BufferRef],
    ) -> None:
        """Meet, and sum what the devices of all ranks have computed.

        Args:
            attempt: Gets the sums, not divided yet; it is not complete where a rank has to compute its share
                again.
            position: What must be the same on all ranks.
            repeat: Whether shards of this rank were left out.
            workloads: Of this rank's devices, from the next attempt on.
            like: Tensors of the shapes, dtypes and devices of the gradients.
            buffer_refs: The model's buffers.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else.
            PeerInterrupt: A rank was interrupted.
        """
        devices, share, timer, main_device = attempt.device_gradients, attempt.share, self._timer, like[0].device
        gradients = self._sum.announce([each.gradients.partials for each in devices], share)
        buffers = RankBuffers.of(devices, share, buffer_refs) if buffer_refs else RankBuffers()
        timer.end_compute(main_device, share.runs, self.workloads)
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
        told = self.coordinator.exchange_reports(position, report.to_plain(), repeat=repeat)
        attempt.complete = told is not None
        if told is not None:
            reports = list(map(RankReport.from_plain, told))
            self._sum_gradients(attempt, reports, timed=position["computation"] == 0, main_device=main_device)
            attempt.buffers = [sum_buffers(self._communicator, buffers, reports, buffer_refs)] if buffer_refs else []
        self.coordinator.end_exchange()

    def _sum_gradients(
        self, attempt: Attempt, reports: Sequence[RankReport], *, timed: bool, main_device: torch.device
    ) -> None:
        """Put into the attempt what all ranks have computed.

        Args:
            attempt: The attempt.
            reports: Of all ranks.
            timed: Whether the time that it takes counts; a search, or another network, takes its own.
            main_device: The device of the sums.
        """
        attempt.reports, attempt.samples = [], 0
        contributions, steady = [], self._update_assignment(reports)
        for report in reports:
            attempt.reports += report.shards
            attempt.samples += report.samples
            contributions.append(report.gradients)
            steady &= len(report.workloads) == 1
        self._timer.start_sum()
        # Not divided on the way: every rank divides and checks in one pass over the memory.
        attempt.gradients = self._sum.sum(tuple(contributions), steady=steady)
        if timed:
            self._timer.end_sum(main_device, [len(each.shards) for each in contributions])

    def _update_assignment(self, reports: Sequence[RankReport]) -> bool:
        """Take over what all ranks told of their speeds, and return whether shards stay where they are."""
        timer, before = self._timer, self.assignment.speeds
        measurements, workloads = [], []
        for report in reports:
            measurements.append(report.measurement)
            workloads.append(report.workloads)
        timer.adopt(measurements)
        steady = workloads == self._workloads and timer.speeds == before
        if workloads != self._workloads:
            timer.restart()
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
        rows = [[each.shard, each.batch, _range_args(each.samples), each.loss, each.parameter] for each in found]
        return [
            NonFiniteShard(shard, batch, range(*samples), loss, parameter)
            for message in self._communicator.exchange(json.dumps(rows).encode())
            for shard, batch, samples, loss, parameter in json.loads(message)
        ]


def join_ranks(
    communicator: Communicator,
    workloads: Sequence[float],
    consistency: RankConsistency,
    *,
    movable: bool,
    measured: bool,
) -> RankReduction | None:
    """Get to know the devices of all ranks; every rank calls it.

    Args:
        communicator: Joins them.
        workloads: The relative speeds of this rank's devices.
        consistency: Compares the ranks when they meet.
        movable: Whether the result is the same wherever shards are computed.
        measured: Whether workloads are to be measured, and those of the ranks with them.

    Returns:
        What reduces over them; None for a process that is alone.

    Raises:
        ValueError: Workloads are to be measured on some ranks only.
    """
    if communicator.size == 1:
        return None
    own = [list(workloads), movable and communicator.exact, measured, machine_name()]
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
    return RankReduction(communicator, RankCoordinator(communicator, consistency, total), total, known, timer)


def machine_name() -> str:
    """Name this machine; a network namespace of Linux counts as one, for it reaches others by a network."""
    name = socket.gethostname()
    namespace = Path("/proc/self/ns/net")
    return f"{name}, {namespace.readlink()}" if namespace.is_symlink() else name


def _range_args(samples: range) -> tuple[int, int, int]:
    return samples.start, samples.stop, samples.step
