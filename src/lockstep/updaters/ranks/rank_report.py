"""Describe a rank's share of an attempt, so that every rank can continue as if it had computed all shares.

A report is text (JSON), so nothing that another process sends can run code. Numbers survive exactly: floats as their
shortest exact decimal, tensors of one element with their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, SupportsFloat

import torch

from lockstep.communicators import Contribution
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
