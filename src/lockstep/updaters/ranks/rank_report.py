"""Describe a rank's share of an attempt, so that every rank can continue as if it had computed all shares.

A report is text (JSON), so nothing that another process sends can run code. Numbers survive exactly: floats as their
shortest exact decimal, tensors of one element with their dtype. Buffers are summed over ranks after the reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, SupportsFloat

import torch

from lockstep.communicators import Communicator, Contribution, SumAudit
from lockstep.digest import fingerprint
from lockstep.replicas import EXTREMES, BufferRef, BufferSum, as_real, merged_firsts, move_partials, rule_error
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.ranks.rank_sum import merge_devices
from lockstep.updaters.result import ShardReport

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
