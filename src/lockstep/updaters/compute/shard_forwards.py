"""Run a function on the shards of one device, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.communicators import Watch
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import Precision
from lockstep.replicas import ShardRunner

ShardFunction = Callable[[int, Any], Any]
"""Called as ``function(place, given)`` with the index of the device and the value prepared for the shard."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a function returned for one shard.

    Attributes:
        shard: The shard.
        given: The value that the function was given.
        returned: The value that it returned.
        reports: The sum and the weight of each value that was reported meanwhile (see `lockstep.report`).
    """

    shard: Shard
    given: Any
    returned: Any
    reports: Mapping[str, Any]


@dataclass(slots=True)
class DeviceForwards:
    """Run a function on the shards of one device; a `ShardTask`.

    Attributes:
        function: The function.
        precision: The precision policy.
        observers: The replica's modules under the names that they report by.
        watch: Where this process records what it is doing.
        results: The results of the shards so far.
    """

    function: ShardFunction
    precision: Precision
    observers: Observers
    watch: Watch
    results: list[ShardResult] = field(default_factory=list)
    phase: ClassVar[str] = "forward"

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Run the function on a shard.

        Args:
            runner: The runner of the replica to use.
            shard: The shard.
            given: The value for the function.

        Raises:
            ReplicaError: If the function raised; the original error is the cause.
        """
        # As in an update: a shard that saw the buffers of the one before it would depend on the number of devices.
        if runner.buffers.entries:
            runner.buffers.restore()
        self.watch.phase = "evaluation"
        try:
            with (
                self.precision.autocast(runner.device.type),
                collecting(self.observers, len(shard.samples)) as reports,
            ):
                returned = self.function(runner.place, given)
        except Exception as error:
            raise runner.error("forward", shard, error) from error
        self.results.append(ShardResult(shard, given, returned, reports.pairs))
