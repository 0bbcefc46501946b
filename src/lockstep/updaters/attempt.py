"""What one try at a batch came to, before anything of it is applied."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.replicas.buffers import AnyBufferSum
from lockstep.tree import Tensors
from lockstep.updaters.result import ShardReport
from lockstep.updaters.verdict import Verdict


@dataclass(slots=True)
class WholeBatch:
    """What the shards of all places add up to; the same on every rank.

    Attributes:
        gradients: Summed; None where no shard had one.
        buffers: What the shards made of the buffers, one entry for each place that was added up.
        samples: How many took part; 1 where a single shard did.
        reports: What each shard that took part measured, in order.
    """

    gradients: Tensors
    buffers: list[AnyBufferSum]
    samples: int
    reports: list[ShardReport]


@dataclass(slots=True)
class Attempt:
    """What one try at a batch came to; nothing of the training state has changed.

    Attributes:
        gradients: The gradient of the mean loss for each parameter that asks for one; None where no shard
            reached it.
        verdict: Whether it is finite.
        buffers: What the shards made of the buffers, one entry a place.
        samples: How many samples took part; 1 where a single shard did.
        reports: What each shard that took part measured, in order.
    """

    gradients: Tensors
    verdict: Verdict
    buffers: list[AnyBufferSum]
    samples: int
    reports: list[ShardReport]

    @property
    def nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient is not finite, or None; waits for the device."""
        return self.verdict.nonfinite
