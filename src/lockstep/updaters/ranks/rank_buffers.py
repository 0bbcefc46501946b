"""Combine over ranks what their shards made of the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lockstep.communicators import Communicator, Contribution
from lockstep.replicas import BufferRef, BufferSum, as_real, move_partials
from lockstep.tree import PartialSum, ShardSum
from lockstep.updaters.compute import DeviceGradients, RankShare
from lockstep.updaters.ranks.rank_report import RankReport
from lockstep.updaters.ranks.rank_sum import merge_devices

NOTHING: Final = Contribution()


@dataclass(slots=True)
class RankBuffers:
    """What the devices of this rank made of the buffers, in one list of partial sums.

    Attributes:
        partials: Of twice as many tensors as there are buffers: sums for means, then those set once.
        weights: For each buffer, the weights of the shards that changed it.
        contribution: Describes the partial sums.
    """

    partials: list[PartialSum] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    contribution: Contribution = NOTHING

    @classmethod
    def of(cls, devices: Sequence[DeviceGradients], share: RankShare, slots: Sequence[BufferRef]) -> RankBuffers:
        """Merge what each device has.

        Args:
            devices: Of this rank.
            share: Its shards.
            slots: The model's buffers, at least one.
        """
        sums = [device.buffers.resolve() for device in devices]
        home = next(buffer.device for slot in slots if (buffer := slot.get()) is not None)
        partials = merge_devices([each.weighted_sums.partials for each in sums], share, home)
        firsts = [
            next((each.firsts[index] for each in sums if each.firsts[index] is not None), None)
            for index in range(len(slots))
        ]
        for partial in partials:
            partial.tensors += [None] * len(slots)
        if partials:
            partials[0].tensors[len(slots) :] = move_partials([PartialSum(0, firsts)], home)[0].tensors
        weights = [sum(each.weights[index] for each in sums) for index in range(len(slots))]
        return cls(partials, weights, Contribution.of(partials))


def sum_buffers(
    communicator: Communicator, own: RankBuffers, reports: Sequence[RankReport], slots: Sequence[BufferRef]
) -> BufferSum:
    """Add up buffers over ranks, and take those that are set once from the first rank that has them.

    Args:
        communicator: Joins the ranks.
        own: What this rank has.
        reports: What every rank has told.
        slots: The model's buffers.
    """
    count = len(slots)
    weights = [sum(each) for each in zip(*(report.buffer_weights for report in reports), strict=True)]
    if not any(mask for report in reports for mask in report.buffers.present):
        unchanged = PartialSum(0, [None] * count)
        return BufferSum(ShardSum(partials=[unchanged]), weights, [None] * count)
    contributions = _first_only([report.buffers for report in reports], count)
    for partial, mask in zip(own.partials, contributions[communicator.rank].present, strict=True):
        partial.tensors[:] = [tensor if mask >> index & 1 else None for index, tensor in enumerate(partial.tensors)]
    like = [buffer for slot in slots if (buffer := slot.get()) is not None]
    summed = communicator.sum_partials(own.partials, contributions, [*map(as_real, like), *like], compress=False)
    return BufferSum(ShardSum(partials=[PartialSum(0, summed[:count])]), weights, summed[count:])


def _first_only(contributions: Sequence[Contribution], count: int) -> list[Contribution]:
    """Leave out of the buffers that are set once those that an earlier partial sum has as well."""
    means = (1 << count) - 1
    taken = 0
    left: list[Contribution] = []
    for contribution in contributions:
        present: list[int] = []
        for mask in contribution.present:
            firsts = mask & ~means & ~taken
            taken |= firsts
            present.append(mask & means | firsts)
        left.append(Contribution(contribution.shards, tuple(present)))
    return left
