"""Reduce what the devices of all ranks have computed, so that every rank holds the gradient of the whole batch."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lockstep.communicators import Communicator, Contribution, SumAudit, SumFault
from lockstep.replicas import BufferRef
from lockstep.updaters.attempt.attempt import Attempt, Described
from lockstep.updaters.attempt.audit import Exchange
from lockstep.updaters.compute.clock import workloads_of
from lockstep.updaters.compute.shares import RankWorkloads
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.coordinator import Position, RankCoordinator, describe_batch
from lockstep.updaters.ranks.rank_report import RankBuffers, RankReport, sum_buffers
from lockstep.updaters.ranks.rank_sum import RankSum
from lockstep.updaters.result import NonFiniteShard
from lockstep.updaters.setup.names import MAIN

LOG = logging.getLogger("lockstep")


class RankReduction:
    """Reduces over ranks, in the exchange in which the ranks describe their partial sums to each other.

    Args:
        communicator: The communicator of the run.
        consistency: Compares what must be equal on all ranks.
        workloads: The relative speeds of the devices of every rank.
        may_move: Whether shards may move to other devices during the run, because that changes no bit.
        one_machine: Whether all ranks are on one machine.
    """

    def __init__(
        self,
        communicator: Communicator,
        consistency: RankConsistency,
        workloads: Sequence[Sequence[float]],
        *,
        may_move: bool,
        one_machine: bool,
    ) -> None:
        self.one_machine = one_machine
        """Whether all ranks are on one machine."""
        self._communicator = communicator
        self._sum = RankSum(communicator, one_machine=one_machine)
        self.coordinator = RankCoordinator(communicator, consistency, self._sum)
        self._was_steady = False
        self._batches: list[Described] = []
        self.may_move = may_move
        """Whether shards may still move to other devices; they do so once."""
        self.rank = communicator.rank
        """The rank of this process."""
        self.workloads: RankWorkloads = tuple(map(tuple, workloads))
        """The workloads of the devices of all ranks, as of the last exchange."""

    def start_attempt(self, attempt: Attempt, update: int) -> None:
        """Record that the shards of an attempt are about to be computed, and describe its batches.

        Args:
            attempt: The attempt, with its batches.
            update: The number of updates that are done.
        """
        name = "" if attempt.given_batches else MAIN
        # The batches that a step function has taken come first, so that an error names the iterator if it can.
        self._batches = [*attempt.request.taken, *(describe_batch(each, name, update) for each in attempt.batches)]

    def begin_early_send(self, attempt: Attempt, position: Position, like: Sequence[torch.Tensor]) -> None:
        """Send gradients while backward still computes others, where that is possible.

        Args:
            attempt: The attempt whose shards are about to be computed.
            position: What must be the same on all ranks.
            like: Tensors with the shapes, dtypes and devices of the gradients.
        """
        # In half precision gradients are converted first.
        is_held = attempt.gradient_context.precision.held_dtype is not None
        key = None if is_held else json.dumps([position["computation"], position["batch sizes"]])
        attempt.gradient_context.early_send = self._sum.begin_sum(key, attempt.share, like)
        if attempt.gradient_context.early_send is not None:
            # Of an attempt after an overflow, whose gradients are sent before they could be compared.
            attempt.audit = None

    def reduce(
        self,
        attempt: Attempt,
        *,
        position: Position,
        repeat: bool,
        speeds: Sequence[float] | None,
        buffer_refs: Sequence[BufferRef],
        refuted: Callable[[Sequence[Sequence[str | None]], Exchange], bool],
        damaged: Callable[[SumFault], bool],
    ) -> None:
        """Exchange reports, and sum what the devices of all ranks have computed.

        Args:
            attempt: Receives the sums, not divided yet. It is not complete if a rank has to compute its share again.
            position: What must be the same on all ranks.
            repeat: Whether shards of this rank were left out.
            speeds: The measured speeds of this rank's devices; None if they are not known.
            buffer_refs: References to the model's buffers.
            refuted: Whether an audit has found a wrong result, given what the ranks have computed for it.
            damaged: Raises if a sum was wrong, or returns whether the attempt is to be made once more.

        Raises:
            PeerError: If a rank failed.
            DisagreementError: If a rank is at another position.
            PeerInterrupt: If a rank was interrupted.
            ValueError: If shards of several ranks changed a buffer that has no mean to different values.
        """
        devices, share = attempt.device_tasks, attempt.share
        gradients = self._sum.announce([each.gradients.partials for each in devices], share)
        buffers = RankBuffers.of(devices, share, buffer_refs) if buffer_refs else RankBuffers()
        audit = None
        if attempt.audit is not None:
            audit = SumAudit([*self._sum.partials, *buffers.partials], attempt.audit.turn)
        report = RankReport(
            [shard for device in devices for shard in device.reports],
            sum([device.buffer_weight for device in devices]),
            gradients,
            Contribution.of(buffers.partials),
            buffers.weights,
            buffers.described(buffer_refs) if attempt.gradient_context.is_first else {},
            speeds if self.may_move else None,
            None if attempt.audit is None else attempt.audit.to_plain(),
        )
        # All shards are computed by now but nothing has been summed, so ranks with other batches can raise here.
        plain_reports = self.coordinator.exchange_reports(position, self._batches, report.to_plain(), repeat=repeat)
        reports = [RankReport.from_plain(each) for each in plain_reports or ()]
        audited = [report.audited for report in reports if report.audited is not None]
        # All ranks have the same reports, so that all of them compute the shard and the sums again or none does.
        if not reports or len(audited) < len(reports):
            audit = None
        is_refuted = audit is not None and refuted(audited, self._communicator.exchange_json)
        attempt.complete = plain_reports is not None and not is_refuted
        if attempt.complete:
            self._add_up(attempt, reports, audit)
            attempt.buffer_sums = (
                [sum_buffers(self._communicator, buffers, reports, buffer_refs, audit)] if buffer_refs else []
            )
            if audit is not None and audit.fault is not None:
                attempt.complete = not damaged(audit.fault)
            if attempt.gradient_context.carried is not None:
                attempt.carried = attempt.gradient_context.carried.merged(self._communicator.gather_objects)
        # Only after the sums: an error within them reaches the other ranks anyway, and must not be sent twice.
        self.coordinator.end_exchange()

    def _add_up(self, attempt: Attempt, reports: Sequence[RankReport], audit: SumAudit | None) -> None:
        """Store what all ranks have computed in the attempt."""
        # In order of ranks, which is the order of shards: divisor and mean loss are the same on every rank.
        attempt.reports = [shard for report in reports for shard in report.shards]
        attempt.buffer_weight = sum([report.buffer_weight for report in reports])
        steady = self._update_assignment(reports) and attempt.may_send_early
        # Not divided during the sum: every rank divides and checks in one pass over memory afterwards.
        attempt.gradients = self._sum.sum(tuple(each.gradients for each in reports), steady=steady, audit=audit)

    def _update_assignment(self, reports: Sequence[RankReport]) -> bool:
        """Adopt the speeds that all ranks have measured; return whether shards stay where they are."""
        speeds = [report.speeds for report in reports if report.speeds is not None]
        # A rank that has repeated an attempt knows its speeds earlier than the others.
        steady = len(speeds) < len(reports)
        if not steady:
            self.workloads = tuple(map(tuple, workloads_of(speeds)))
            self.may_move = False
        if steady and not self._was_steady and self._communicator.rank == 0:
            LOG.info("Shards on each rank: %s.", " + ".join(str(len(each.shards)) for each in reports))
        self._was_steady = steady
        return steady

    def gather_nonfinite(self, found: Sequence[NonFiniteShard]) -> list[NonFiniteShard]:
        """Return the non-finite shards that all ranks have found, on every rank."""
        return [each for shards in self._communicator.gather_objects(found) for each in shards]


def join_ranks(
    communicator: Communicator,
    workloads: Sequence[float],
    consistency: RankConsistency,
    *,
    movable: bool,
    measure: bool,
) -> RankReduction | None:
    """Exchange the devices of all ranks, and create what reduces over them; every rank calls this.

    Args:
        communicator: The communicator of the run.
        workloads: The relative speeds of this rank's devices.
        consistency: Compares what must be equal on all ranks.
        movable: Whether the result is independent of where shards are computed.
        measure: Whether the workloads of devices and ranks are to be measured.

    Returns:
        The reduction over ranks; None for a process that is the whole run.

    Raises:
        ValueError: If workloads are to be measured on some ranks only.
    """
    if communicator.size == 1:
        return None
    # A compressed sum depends on where shards are cut, so its shards must not move.
    own = [list(workloads), movable and communicator.exact, measure, machine_name()]
    all_workloads, all_movable, all_measure, machines = zip(*communicator.exchange_json(own), strict=True)
    for rank, each in enumerate(all_measure):
        if each != all_measure[0]:
            raise ValueError(
                f'`workloads` must be "auto" on every rank or on none, got it on rank {rank if each else 0} '
                f"and not on rank {0 if each else rank}. Ranks can only be timed together: pass "
                '"auto" on all of them, or numbers on each.'
            )
    one_machine = len(set(machines)) == 1
    # A single rank whose shards cannot move is enough to keep all shards where they are.
    return RankReduction(communicator, consistency, all_workloads, may_move=all(all_movable), one_machine=one_machine)


def machine_name() -> str:
    """Return a name for this machine; each Linux network namespace counts as a machine of its own."""
    name = socket.gethostname()
    # Namespaces reach each other over a network, so the limits for networks apply between them.
    namespace = Path("/proc/self/ns/net")
    return f"{name}, {namespace.readlink()}" if namespace.is_symlink() else name
