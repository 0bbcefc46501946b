"""Combine the buffers of shards over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.communicators import Communicator, Contribution, SumAudit
from lockstep.digest import fingerprint
from lockstep.replicas import EXTREMES, BufferRef, BufferSum, as_real, merged_firsts, move_partials, rule_error
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.ranks.rank_report import RankReport
from lockstep.updaters.ranks.rank_sum import merge_devices


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
