"""Reduce what the devices of all ranks have computed, so that every rank holds the gradient of the whole batch.

Each rank describes its share of an attempt in a report, so that every rank can continue as if it had computed all
shares. A report is text (JSON), so nothing that another process sends can run code. Numbers survive exactly: floats as
their shortest exact decimal, tensors of one element with their dtype. Buffers are summed after the reports.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsFloat

import torch

from lockstep.communicators import Communicator, Contribution, SumAudit, SumFault
from lockstep.digest import fingerprint
from lockstep.replicas import EXTREMES, BufferRef, BufferSum, as_real, merged_firsts, move_partials, rule_error
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.attempt.attempt import Attempt, Described
from lockstep.updaters.attempt.audit import Exchange
from lockstep.updaters.compute.clock import workloads_of
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask
from lockstep.updaters.compute.shares import RankShare, RankWorkloads
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.coordinator import Position, RankCoordinator, describe_batch
from lockstep.updaters.ranks.rank_sum import RankSum, merge_devices
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.setup.names import MAIN

SUMS: Final = ("gradients", "buffers")
"""The fields that describe sums."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What the devices of one rank have computed.

    Attributes:
        shards: What each shard that took part measured, in order.
        buffer_weight: The weight of the sum of the buffers: the number of samples in these shards; 1 where a single
            shard makes up the update.
        gradients: The description of this rank's partial sums of gradients.
        buffers: The description of this rank's partial sums of buffers.
        changed_weights: For each buffer, the total weight of the shards that changed it.
        firsts: The digests of buffers that have no mean, by their numbers, where they are compared.
        speeds: The measured speeds of the rank's devices; None until they are known, or if they are not measured.
        audited: What the rank has computed for the audit of the attempt; None if it is not audited.
    """

    shards: Sequence[ShardReport]
    buffer_weight: int
    gradients: Contribution
    buffers: Contribution
    changed_weights: Sequence[float]
    firsts: Mapping[str, str]
    speeds: Sequence[float] | None
    audited: Sequence[str | None] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Convert the report to lists, numbers and text."""
        shards = []
        for report in self.shards:
            metrics: dict[str, Any] = {}
            for name, (total, weight) in report.metrics.items():
                metrics[name] = [_encode_number(total), _encode_number(weight)]
            loss = _encode_number(report.loss.reshape(()))
            shards.append([report.shard, report.weight, loss, metrics, report.has_own_weight])
        plain = {name: getattr(self, name) for name in self.__slots__}
        sums = {name: _encode_contribution(plain[name]) for name in SUMS}
        return {**plain, **sums, "shards": shards}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RankReport:
        """Create a report from what `to_plain` returned."""
        shards = []
        for shard, weight, loss, values, has_own_weight in plain["shards"]:
            metrics: dict[str, Any] = {}
            for name, (total, share) in values.items():
                metrics[name] = (_decode_number(total), _decode_number(share))
            value = torch.as_tensor(_decode_number(loss))
            shards.append(ShardReport(shard, weight, value, metrics, has_own_weight))
        sums = {name: _decode_contribution(plain[name]) for name in SUMS}
        return cls(**{**plain, **sums, "shards": shards})


def _encode_number(value: SupportsFloat) -> Any:
    """Convert a number to one that JSON can represent, or a tensor to its dtype and number; waits for its device."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), value.item()]
    # NumPy scalars are no numbers to the JSON encoder.
    return value if isinstance(value, int | float) else float(value)


def _decode_number(plain: Any) -> Any:
    if isinstance(plain, list):
        kind, number = plain
        # Several times as fast as `torch.tensor`. The device is explicit: the user may have set another default.
        return torch.scalar_tensor(number, dtype=getattr(torch, kind), device="cpu")
    return plain


def _encode_contribution(contribution: Contribution) -> list[Any]:
    """Convert a contribution to lists and text, with masks in hexadecimal: decimal digits of long ones are slow.

    >>> _encode_contribution(Contribution((0, 4), (7, 31)))
    [(0, 4), ['7', '1f'], '0']
    """
    return [contribution.shards, [f"{mask:x}" for mask in contribution.present], f"{contribution.sparse:x}"]


def _decode_contribution(plain: Sequence[Any]) -> Contribution:
    """Create a contribution from what `_encode_contribution` returned.

    >>> _decode_contribution([[0, 4], ["7", "1f"], "0"])
    Contribution(shards=(0, 4), present=(7, 31), sparse=0)
    """
    shards, present, sparse = plain
    return Contribution(tuple(shards), tuple(int(mask, 16) for mask in present), int(sparse, 16))


@dataclass(slots=True)
class RankBuffers:
    """The buffers of this rank's shards, merged into one list of partial sums.

    Attributes:
        partials: Partial sums with two tensors per buffer: first the sums for means, then the values that are set once.
        weights: For each buffer, the total weight of the shards that changed it.
        firsts: The values of this rank's shards that are set once, on any device.
    """

    partials: list[PartialSum] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    firsts: Tensors = field(default_factory=list)

    @classmethod
    def of(
        cls, devices: Sequence[DeviceGradientTask], share: RankShare, buffer_refs: Sequence[BufferRef]
    ) -> RankBuffers:
        """Merge the buffers of all devices.

        Args:
            devices: The results of each device of this rank.
            share: The shards of this rank.
            buffer_refs: References to the model's buffers, at least one.
        """
        sums = [device.buffer_sum.resolve() for device in devices]
        main_device = next(buffer.device for ref in buffer_refs if (buffer := ref.get()) is not None)
        partials = merge_devices([each.weighted_sums.partials for each in sums], share, main_device)
        # Devices are in order of shards, so the first device that has a value has that of the earliest shard.
        firsts: Tensors = [
            merged_firsts(ref.rule, [each.firsts[index] for each in sums]) for index, ref in enumerate(buffer_refs)
        ]
        for partial in partials:
            partial.tensors += [None] * len(buffer_refs)
        # Values that are set once need no tree. They travel with the first partial sum, which every rank with shards
        # has.
        if partials:
            partials[0].tensors[len(buffer_refs) :] = move_partials([PartialSum(0, firsts)], main_device)[0].tensors
        weights = [sum(each.weights[index] for each in sums) for index in range(len(buffer_refs))]
        return cls(partials, weights, firsts)

    def described(self, buffer_refs: Sequence[BufferRef]) -> dict[str, str]:
        """Return the digests of the buffers that have no mean, by their numbers.

        Args:
            buffer_refs: References to the model's buffers.
        """
        pairs = enumerate(zip(buffer_refs, self.firsts, strict=True))
        return {
            str(index): fingerprint([first]).hex()
            for index, (ref, first) in pairs
            if ref.rule == "mean" and first is not None
        }


def sum_buffers(
    communicator: Communicator,
    own: RankBuffers,
    reports: Sequence[RankReport],
    buffer_refs: Sequence[BufferRef],
    audit: SumAudit | None,
) -> BufferSum:
    """Sum buffers over ranks; a buffer that is set once is taken from the first rank that has a value for it.

    Args:
        communicator: The communicator of the run.
        own: The buffers of this rank.
        reports: The reports of all ranks.
        buffer_refs: References to the model's buffers.
        audit: What the sums are compared with; None if they are computed once.

    Raises:
        ValueError: On every rank, if shards of several ranks changed a buffer that has no mean to different values.
    """
    count = len(buffer_refs)
    for index, ref in enumerate(buffer_refs):
        if len({digest for report in reports if (digest := report.firsts.get(str(index)))}) > 1:
            raise rule_error(ref, "shards leave different values there")
    weights = [sum(each) for each in zip(*(report.changed_weights for report in reports), strict=True)]
    # No shard on any rank has changed a buffer. All ranks see that in the reports and skip the sum together.
    if not any(mask for report in reports for mask in report.buffers.present):
        unchanged = PartialSum(0, [None] * count)
        return BufferSum(ShardSum(partials=[unchanged]), weights, [None] * count)
    contributions = _drop_repeated_firsts([report.buffers for report in reports], count)
    for partial, mask in zip(own.partials, contributions[communicator.rank].present, strict=True):
        partial.tensors[:] = [tensor if mask >> index & 1 else None for index, tensor in enumerate(partial.tensors)]
    like = [buffer for ref in buffer_refs if (buffer := ref.get()) is not None]
    # Never compressed: buffers are state, and a rounding would stay in them.
    like = [*map(as_real, like), *like]
    summed = communicator.sum_partials(own.partials, contributions, like, compress=False, audit=audit)
    firsts = summed[count:]
    if any(ref.rule in EXTREMES for ref in buffer_refs):
        # Only a few buffers have such a rule, and a sum cannot carry them.
        taken = [each if ref.rule in EXTREMES else None for ref, each in zip(buffer_refs, own.firsts, strict=True)]
        rows = communicator.gather_objects([None if each is None else each.cpu() for each in taken])
        for index, (ref, found) in enumerate(zip(buffer_refs, zip(*rows, strict=True), strict=True)):
            if ref.rule in EXTREMES:
                firsts[index] = merged_firsts(ref.rule, found)
    return BufferSum(ShardSum(partials=[PartialSum(0, summed[:count])]), weights, firsts)


def _drop_repeated_firsts(contributions: Sequence[Contribution], count: int) -> list[Contribution]:
    """Remove values that are set once from contributions where an earlier partial sum has them too."""
    # The low bits of a mask stand for the sums for means, the high bits for the values that are set once.
    means = (1 << count) - 1
    seen = 0
    left: list[Contribution] = []
    for contribution in contributions:
        present: list[int] = []
        for mask in contribution.present:
            firsts = mask & ~means & ~seen
            seen |= firsts
            present.append(mask & means | firsts)
        left.append(Contribution(contribution.shards, tuple(present)))
    return left


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
