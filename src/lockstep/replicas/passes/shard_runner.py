"""Run shards on one replica: the engine under `ParallelUpdater`, `ReplicaGroup` and `DataParallel`.

What is done with a shard is a `ShardTask`: a forward whose graph is kept, the backward that follows it, or
both at once, as in an update. Everything around it is the same for all three and is here: the look whether to
go on, the buffers a shard starts from, its random stream, gradients that a failed backward left behind, and
the errors that name the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from lockstep.errors import ReplicaError
from lockstep.plan import Shard
from lockstep.replicas.buffers import ReplicaBuffers
from lockstep.replicas.passes.shard_streams import ShardStreams
from lockstep.replicas.pool import ReplicaSet, samples_text
from lockstep.tree import Tensors


class ShardTask(Protocol):
    """What is done with each shard of one device."""

    @property
    def phase(self) -> str:
        """What a shard begins with: ``"forward"`` or ``"backward"``."""

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Do the work of one shard, inside its random stream.

        Args:
            runner: The replica to use.
            shard: Which one.
            given: What the caller of `ShardRunner.run` gave for this shard.
        """


@dataclass(frozen=True, slots=True)
class ShardRunner:
    """One replica and what is needed to run shards on it.

    Attributes:
        place: Its number among the devices of the process.
        replicas: The group of replicas it belongs to, which knows whether to go on.
        device: Where it lives.
        replica: Its copy of the model.
        parameters: Those of its parameters that require a gradient.
        buffers: Its buffers.
        names_batches: Whether errors tell which batch a shard is cut from, because there may be several.
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

        Shards that follow a request to stop are left out.

        Args:
            work: The shards in ascending order, each with what the task needs for it.
            task: What to do with each.
            streams: Opens the random stream of a shard.

        Raises:
            BaseException: What the task raised; no gradient stays in the replica's parameters.
        """
        phase = task.phase
        for shard, given in work:
            if not self.replicas.progress.proceed(self.place, phase, shard):
                return
            try:
                with streams.open(shard, self.device):
                    task.run(self, shard, given)
            except BaseException:
                self.take_gradients()  # backward may have come halfway, and the next one would add to that
                raise

    def backward(
        self,
        shard: Shard,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        retain_graph: bool = False,
    ) -> None:
        """Leave the gradients of some tensors in the replica's parameters.

        Args:
            shard: Which shard they are of, for errors.
            tensors: At least one.
            gradients: What backward begins with, one for each tensor; None for 1.
            retain_graph: Whether backward is to be possible once more.

        Raises:
            ReplicaError: Backward raised; the original error is the cause.
        """
        first = tensors[0]
        try:
            if type(first) is torch.Tensor and first.is_cpu:
                # What `torch.autograd.backward` does, without its look at arguments that are known to fit:
                # forty lines of Python, for which shards in other threads would wait. The work is done in
                # this thread, and so in the shard's random stream.
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
            # Autograd's own threads for accelerators know nothing of the shard's stream.
            with torch.autograd.set_multithreading_enabled(False):
                if len(tensors) == 1:
                    first.backward(gradients[0], retain_graph=retain_graph)  # type: ignore[no-untyped-call]
                    # torch's gap
                else:
                    torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
        except Exception as error:
            raise self.error("backward", shard, error) from error

    def take_gradients(self) -> Tensors:
        """Take the gradients away from the replica's parameters; None where backward did not reach."""
        gradients: Tensors = []
        for parameter in self.parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def error(self, phase: str, shard: Shard, error: Exception) -> ReplicaError:
        """Return the error that names the shard and device whose user code raised another one."""
        devices = self.replicas.devices
        where = f"{self.device} (device {self.place} of 0..{len(devices) - 1})"
        batch = f" of batch {shard.batch}" if self.names_batches else ""
        what = f"The {phase} of shard {shard.index} ({samples_text(shard)}{batch})"
        return ReplicaError(
            f"{what} raised {type(error).__name__} on {where}: {error}",
            device=str(self.device),
            shard=shard.index,
        )
