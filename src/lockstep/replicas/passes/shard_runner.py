"""Run shards on one replica, for `ParallelUpdater`, `ReplicaGroup` and `DataParallel`.

What is done with a shard is a `ShardTask`: a forward that keeps its graph, the backward that follows it, or both at
once, as in an update. What surrounds it is the same in all three cases and is defined here: the check whether to stop,
the random stream of the shard, the removal of gradients that a failed backward left behind, and the errors that name
the shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from lockstep.errors import ReplicaError
from lockstep.plan import Shard
from lockstep.replicas.buffers.buffer_refs import BufferRules
from lockstep.replicas.buffers.replica_buffers import ReplicaBuffers
from lockstep.replicas.passes.shard_streams import ShardStreams
from lockstep.replicas.pool.deterministic import cure_of
from lockstep.replicas.pool.progress import samples_text
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.tree import Tensors

GRADIENT_OF: Final = attrgetter("grad")
CONSUME: Final = deque[object](maxlen=0).extend
"""Runs an iterator to its end."""


class ShardTask(Protocol):
    """The work to do on each shard of one device."""

    @property
    def phase(self) -> str:
        """The name of the first phase: ``"forward"`` or ``"backward"``."""

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Run the work on one shard, inside its random stream.

        Args:
            runner: The replica to use.
            shard: The shard.
            given: The value that was passed to `ShardRunner.run` for this shard.
        """


@dataclass(frozen=True, slots=True)
class ShardRunner:
    """A replica together with what is needed to run shards on it.

    Attributes:
        place: The index of the device among those of the process.
        replicas: The replicas of all devices, which know whether to stop.
        device: The device of the replica.
        replica: The copy of the model.
        parameters: The parameters of the replica that require a gradient.
        buffers: The buffers of the replica.
        names_batches: Whether error messages name the batch of a shard, because there may be several batches.
    """

    place: int
    replicas: ReplicaSet
    device: torch.device
    replica: nn.Module
    parameters: Sequence[nn.Parameter]
    buffers: ReplicaBuffers
    names_batches: bool = False

    def run(self, work: Iterable[tuple[Shard, Any]], task: ShardTask, streams: ShardStreams) -> None:
        """Run a task on shards one after another, each in its own random stream.

        After a request to stop, the remaining shards are skipped.

        Args:
            work: The shards in ascending order, each with a value for the task.
            task: The task.
            streams: The random streams of the shards.

        Raises:
            BaseException: If the task raised. No gradient is left in the parameters of the replica.
        """
        phase = task.phase
        for shard, given in work:
            if not self.replicas.progress.enter_phase(self.place, phase, shard):
                return
            try:
                with streams.open(shard, self.device):
                    task.run(self, shard, given)
            except BaseException:
                # Backward may have stored some of the gradients, and the next one would add to them.
                self.pop_gradients()
                raise

    def backward(
        self,
        shard: Shard,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run backward from tensors, storing the gradients in the parameters of the replica.

        Args:
            shard: The shard of the tensors, for error messages.
            tensors: The tensors to start from, at least one.
            gradients: The gradient of each tensor, or None for 1.
            retain_graph: Whether backward can be run again.

        Raises:
            ReplicaError: If backward raised. The original error is the cause.
        """
        first = tensors[0]
        try:
            if type(first) is torch.Tensor and first.is_cpu:
                # The engine call of `torch.autograd.backward` without its argument checks: forty lines of Python,
                # during which shards in other threads would wait. A CPU backward runs in the calling thread, and
                # therefore in the random stream of the shard.
                if gradients[0] is None:
                    gradients = [torch.ones_like(first)]
                _engine_run_backward(
                    tuple(tensors),
                    tuple(gradients),
                    retain_graph,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
                return
            # The threads of autograd for accelerators do not have the random stream of the shard.
            with torch.autograd.set_multithreading_enabled(False):
                if len(tensors) == 1:
                    # By the method, which a tensor subclass may override.
                    first.backward(gradients[0], retain_graph=retain_graph)  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
        except Exception as error:
            raise self.error("backward", shard, error) from error

    def pop_gradients(self) -> Tensors:
        """Remove the gradients of the replica's parameters and return them, with None where backward did not reach."""
        gradients: Tensors = list(map(GRADIENT_OF, self.parameters))
        CONSUME(map(setattr, self.parameters, repeat("grad"), repeat(None)))
        return gradients

    def error(self, phase: str, shard: Shard, error: Exception) -> ReplicaError:
        """Return an error that names the shard and device on which user code raised another one.

        Args:
            phase: The phase that raised: ``"forward"`` or ``"backward"``.
            shard: The shard.
            error: The original error.
        """
        devices = self.replicas.devices
        where = f"{self.device} (device {self.place} of 0..{len(devices) - 1})"
        batch = f" of batch {shard.batch + 1} of this update" if self.names_batches else ""
        what = f"The {phase} of shard {shard.index} ({samples_text(shard)}{batch})"
        return ReplicaError(
            f"{what} raised {type(error).__name__} on {where}: {error}{cure_of(error)}{_cure_of_size(error, shard)}",
            device=str(self.device),
            shard=shard.index,
        )


def create_runners(replicas: ReplicaSet, rules: BufferRules = "mean") -> list[ShardRunner]:
    """Create a runner for each replica.

    Args:
        replicas: The model and its replicas, up to date.
        rules: The rules that combine buffers over shards.
    """
    return [create_runner(replicas, place, replica, rules) for place, replica in enumerate(replicas.replicas)]


def create_runner(
    replicas: ReplicaSet, place: int, replica: nn.Module, rules: BufferRules = "mean", *, names_batches: bool = False
) -> ShardRunner:
    """Create the runner of one replica.

    Args:
        replicas: The model and its replicas, up to date.
        place: The index of the device.
        replica: The replica, which need not be one of `replicas`.
        rules: The rules that combine buffers over shards.
        names_batches: See `ShardRunner`.
    """
    # Replicas list their parameters in the model's order, so one index means the same parameter on every device.
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    buffers = ReplicaBuffers(replicas.model, replica, rules)
    return ShardRunner(place, replicas, replicas.devices[place], replica, parameters, buffers, names_batches)


def _cure_of_size(error: Exception, shard: Shard) -> str:
    """Return what to do about an error of a normalization that has only one value per channel in a shard."""
    if "more than 1 value per channel" not in str(error):
        return ""
    return (
        f". Batch normalization needs at least 2 values per channel in every shard, and this shard has "
        f"{len(shard.samples)} of the samples of its batch. Lower `num_shards`; or, if this is the last batch of an "
        'epoch, which is shorter, leave it out by last_batch="drop" or complete it by last_batch="wrap".'
    )
