"""What a rank says of its part of a try, so that every rank can go on as if it had done all of it.

An account is text (JSON), so nothing that arrives from another process can run code, and numbers come back
as they were: floats by their shortest exact decimal, tensors of one element with their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch

from lockstep.communicators import Contribution
from lockstep.updaters.pace import Told
from lockstep.updaters.result import ShardReport


@dataclass(frozen=True, slots=True)
class Account:
    """What the places of one rank made of their shards.

    Attributes:
        reports: What each shard that took part measured, in order.
        samples: How many samples these hold; 1 where a single shard makes up the update.
        gradients: Which partial sums of gradients there are.
        buffers: The same for buffers.
        buffer_weights: For each buffer, the weights of the shards that changed it.
        workloads: The relative speeds of the rank's places from the next try on.
        told: How long the rank takes, if it has measured that.
    """

    reports: Sequence[ShardReport]
    samples: int
    gradients: Contribution
    buffers: Contribution
    buffer_weights: Sequence[float]
    workloads: Sequence[float]
    told: Told | None

    def to_plain(self) -> dict[str, Any]:
        """Give it as lists and numbers."""
        return {
            "reports": [_plain_report(report) for report in self.reports],
            "samples": self.samples,
            "gradients": _plain_contribution(self.gradients),
            "buffers": _plain_contribution(self.buffers),
            "buffer_weights": list(self.buffer_weights),
            "workloads": list(self.workloads),
            "told": None if self.told is None else [self.told.seconds, self.told.transfer],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Account:
        """Read what `to_plain` gave."""
        return cls(
            [_report(*report) for report in plain["reports"]],
            plain["samples"],
            _contribution(plain["gradients"]),
            _contribution(plain["buffers"]),
            plain["buffer_weights"],
            plain["workloads"],
            None if plain["told"] is None else Told(*plain["told"]),
        )


def _plain_report(report: ShardReport) -> list[Any]:
    metrics = {name: [_plain(total), _plain(weight)] for name, (total, weight) in report.metrics.items()}
    return [report.shard, report.weight, _plain(report.loss.reshape(())), metrics]


def _report(shard: int, weight: float, loss: Any, metrics: Mapping[str, Any]) -> ShardReport:
    return ShardReport(
        shard,
        weight,
        torch.as_tensor(_value(loss)),
        {name: (_value(total), _value(share)) for name, (total, share) in metrics.items()},
    )


def _plain(value: SupportsFloat) -> Any:
    """Turn a number into one that JSON knows, or a tensor into its dtype and number; waits for its device."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), value.item()]
    return value if isinstance(value, int | float) else float(value)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        kind, number = plain
        dtype = getattr(torch, kind)
        if isinstance(number, float):
            return torch.scalar_tensor(number, dtype=dtype, device="cpu")  # several times as fast as `tensor`
        return torch.tensor(number, dtype=dtype, device="cpu")
    return plain


def _plain_contribution(contribution: Contribution) -> list[Any]:
    # In hexadecimal: decimal digits of a mask over thousands of tensors are slow to make and to read.
    return [list(contribution.shards), [f"{mask:x}" for mask in contribution.present], contribution.sparse]


def _contribution(plain: Sequence[Any]) -> Contribution:
    shards, present, sparse = plain
    return Contribution(tuple(shards), tuple(int(mask, 16) for mask in present), sparse)
