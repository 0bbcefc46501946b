"""Run a model's forward on shards of a batch, keep what they returned, and run backward from it later.

The shards are computed by the replicas of a `ReplicaSet`, all devices at once, each shard in its own random
stream and from the same buffers, as in an update. What an update does in one go is in two halves here: a
`Forward` keeps each shard's graph and how far its stream was drawn from, and `ForwardBackward.backward` goes on there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Final

import torch

from lockstep import plan
from lockstep.errors import OrderError
from lockstep.plan import Shard
from lockstep.replicas.batch import BatchDim, Inputs, Outputs, ShardForward, read_outputs
from lockstep.replicas.buffers import (
    AnyBufferSum,
    BufferRef,
    BufferRule,
    ReplicaBuffers,
    TrainedBuffer,
    buffer_refs,
    combine_buffers,
    trained_buffers,
)
from lockstep.replicas.passes.leaks import check_no_leaked_graphs
from lockstep.replicas.passes.shard_runner import ShardRunner
from lockstep.replicas.passes.shard_streams import ShardStreams
from lockstep.replicas.passes.summing import TreeSum
from lockstep.replicas.passes.tasks import BackwardTask, ForwardTask, ModuleMode, ShardObserver
from lockstep.replicas.pool import SINGLE_THREAD, CallSigint, ComputeMode, InheritedSettings, ReplicaSet, ThreadSettings
from lockstep.tree import PartialSum, ShardSum, Tensors

SHARD_OF: Final = attrgetter("shard")


@dataclass(slots=True)
class Forward:
    """A forward that was run, and what its backward needs.

    Attributes:
        inputs: What the model was called with.
        shards: The shards of each device, in order.
        key: Of the shards' random streams.
        mode: How modules ran.
        settings: Under which the threads computed.
        replicas: Where they ran.
        parameters: The model's parameters that ask for a gradient, with their names, in the order of the
            replicas', and after them its buffers that do.
        trained_buffers: The numbers of these buffers.
        has_graph: Whether backward can be run.
        done: What each shard left behind, by device.
    """

    inputs: Inputs
    shards: list[list[Shard]]
    key: int
    mode: ModuleMode
    settings: ThreadSettings
    replicas: list[ShardRunner]
    parameters: list[tuple[str, torch.Tensor]]
    trained_buffers: list[int]
    has_graph: bool
    done: list[list[ShardForward]] = field(default_factory=list)
    outputs: Outputs = field(init=False)
    """What the shards returned, ready to be put together."""


@dataclass(slots=True)
class Backward:
    """What a backward gave.

    Attributes:
        parameters: For each device the sums over its shards, one entry for each of `Forward.parameters`; half
            precision as float32.
        inputs: For each shard, by index, the gradient of its part of each input.
        tree_sum: Adds up, in the replicas' threads.
    """

    parameters: list[ShardSum]
    inputs: dict[int, Tensors]
    tree_sum: TreeSum

    def device_total(self, place: int) -> Tensors:
        """Sum the parameters' gradients over the shards of one device, leaving what is here untouched."""
        partials = self.parameters[place].partials
        return self.tree_sum.total(partials, keep=True) if partials else []

    def total(self, *, keep: bool) -> Tensors:
        """Sum the parameters' gradients over all shards, in the tree's order, on the first device.

        Args:
            keep: Leave the sums of the devices as they are; else they are added to in place.
        """
        partials: list[PartialSum] = []
        for place in self.parameters:
            partials += place.partials
        return self.tree_sum.total(partials, keep=keep)


class ForwardBackward:
    """Forward and backward of a model on the devices of a `ReplicaSet`.

    Args:
        replicas: The copies of the model and their threads.
        buffers: The rule by which the buffers of shards are combined; see `replicas.buffers`.
    """

    def __init__(self, replicas: ReplicaSet, *, buffers: BufferRule = "mean") -> None:
        self._set = replicas
        self._rule: BufferRule = buffers
        self._streams = ShardStreams(replicas.devices)
        # Two threads of the user's take turns; one may come back in, from a hook.
        self._lock = threading.RLock()
        self._replicas: list[ShardRunner] = []
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._tree_sum = TreeSum(replicas, [])
        self._slots: list[BufferRef] = []
        self._looked_for_strays = False
        self.watch: ShardObserver | None = None
        """Entered around the forward and the backward of each shard; None costs nothing."""

    def forward(
        self,
        inputs: Inputs,
        *,
        num_shards: int | None = None,
        training: bool | None = None,
        output_dim: BatchDim = 0,
        key: int | None = None,
    ) -> Forward:
        """Run forward on all shards of a batch, and combine the buffers.

        A graph is kept where the calling thread has gradients enabled. Any number of forwards may be alive.

        Args:
            inputs: The batch.
            num_shards: How many shards; None for one a device, sized by its workload.
            training: How modules run; see `ModuleMode.wanted`.
            output_dim: Along which dimension each output is put together; see `read_outputs`.
            key: Of the shards' random streams; one draw from the default generator unless given.

        Raises:
            OrderError: The group is closed, or was told to stop.
            ReplicaError: The model raised in a shard, or a device hung.
            ReplicaInterrupt: Ctrl-C came; all but the random number drawn is as it was.
            TypeError: The model returned something that cannot be put together.
            ValueError: So it is with its shape; or the model computes with parameters of its own.

        Determinism: with a number of shards the bits of all outputs and buffers depend on the batch, the
        model, that number and the key; not on devices or workloads.
        """
        with self._lock, CallSigint() as interrupts, ComputeMode(self._settings()) as settings:
            self._follow()
            buffers: Sequence[TrainedBuffer] = ()
            if self._slots and settings.grad and not inputs.attached:
                buffers = trained_buffers(self._set.model, self._slots, frozen=self._set.frozen)
            forward = Forward(
                inputs,
                schedule(inputs.num_samples, num_shards, tuple(self._set.workloads)),
                draw_key() if key is None else key,
                ModuleMode.wanted(self._set.model, training=training),
                settings,
                self._replicas,
                [*self._parameters, *[(buffer.name, buffer.tensor) for buffer in buffers]]
                if buffers
                else self._parameters,
                [buffer.index for buffer in buffers] if buffers else [],
                has_graph=settings.grad,
            )

            run = partial(self._forward, forward, settings, interrupts)
            sums = self._streams.compute(run, seed=forward.key, in_threads=self._set.wants_threads(forward.shards))
            in_order = list(chain.from_iterable(forward.done))
            _check_complete(len(in_order), forward.shards)
            if forward.has_graph and not inputs.attached and not self._looked_for_strays:
                own = {id(parameter): name for name, parameter in forward.parameters}
                check_no_leaked_graphs(in_order[0].tensors, own)
                self._looked_for_strays = True
            forward.outputs = read_outputs(in_order, inputs.num_samples, output_dim)
            if self._slots:
                self._combine(sums, inputs.num_samples if len(in_order) > 1 else 1)
            return forward

    def backward(
        self, forward: Forward, output_grads: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> Backward:
        """Run backward on all shards, each by the thread of its device.

        Args:
            forward: Its graphs are freed, unless they are to be retained.
            output_grads: The gradient of each merged output; None for none.
            retain_graph: Whether backward is to be possible once more.

        Raises:
            OrderError: There is no graph, or the group is closed, or was told to stop.
            ReplicaError: Backward raised in a shard, or a device hung.
            ReplicaInterrupt: Ctrl-C came.

        Determinism: as `forward`.
        """
        if not forward.has_graph:
            raise OrderError(
                "backward must follow a forward with gradients enabled, and each forward once. Where it is "
                "to be possible again, call backward(retain_graph=True)."
            )
        forward.has_graph = retain_graph
        spent = False

        def run(*, at_once: bool) -> list[BackwardTask]:
            nonlocal spent
            if spent:  # an attempt that drew past its shards' streams has used the graphs up
                with InheritedSettings(forward.settings):
                    self._forward(forward, forward.settings, interrupts, at_once=at_once)
            spent = True
            return self._backward(
                forward, output_grads, settings, interrupts, retain_graph=retain_graph, at_once=at_once
            )

        with self._lock, CallSigint() as interrupts, ComputeMode(self._settings()) as settings:
            if forward.replicas is self._replicas:
                self._set.sync_for_backward()
            tasks = self._streams.compute(run, seed=forward.key, in_threads=self._set.wants_threads(forward.shards))
        inputs: dict[int, Tensors] = {}
        for task in tasks:
            inputs.update(task.inputs)
        _check_complete(len(inputs), forward.shards)
        return Backward([task.sums for task in tasks], inputs, self._tree_sum)

    def release(self) -> None:
        """Let go of replicas, and give torch back its random kernels, until the next forward."""
        self._replicas = []
        self._streams.release()

    def _settings(self) -> ThreadSettings:
        """Take what the calling thread computes under, as far as other threads have to know it."""
        if self._set.uses_threads:
            return ThreadSettings.capture(self._set.device_types)
        return _alone(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def _follow(self) -> None:
        """Follow the model where it has changed since the last time."""
        if not self._set.refresh() and self._replicas:
            return
        model, replicas, devices = self._set.model, self._set.replicas, self._set.devices
        pairs = zip(model.named_parameters(), replicas[0].parameters(), strict=True)
        self._parameters = [named for named, copied in pairs if copied.requires_grad]
        self._tree_sum = TreeSum(self._set, [parameter.numel() for _, parameter in self._parameters])
        self._slots = buffer_refs(model)
        self._looked_for_strays = False
        self._replicas = [
            ShardRunner(
                place,
                self._set,
                device,
                replica,
                [parameter for parameter in replica.parameters() if parameter.requires_grad],
                ReplicaBuffers(model, replica, self._rule),
            )
            for place, (device, replica) in enumerate(zip(devices, replicas, strict=True))
        ]

    def _forward(
        self, forward: Forward, settings: ThreadSettings, interrupts: CallSigint, *, at_once: bool
    ) -> list[AnyBufferSum]:
        """Run forward on all devices from a calling thread that is in the state for it."""
        tasks: list[ForwardTask | None] = [None] * len(forward.shards)
        window = interrupts.window

        def work(place: int) -> None:
            runner, shards = forward.replicas[place], forward.shards[place]
            tasks[place] = task = ForwardTask(
                forward.inputs,
                forward.mode,
                self.watch,
                window,
                settings.grad,
                runner.buffers.start_shards(shards[0].index if shards else 0),
                forward.trained_buffers,
            )
            runner.run(zip(shards, shards, strict=True), task, self._streams)

        self._set.run(work, settings=settings, at_once=at_once, waiting=window)
        forward.done, sums = [], []
        for task in tasks:
            forward.done.append([] if task is None else task.done)
            if task is not None:
                sums.append(task.buffers)
        return sums

    def _backward(
        self,
        forward: Forward,
        output_grads: Sequence[torch.Tensor | None],
        settings: ThreadSettings,
        interrupts: CallSigint,
        *,
        retain_graph: bool,
        at_once: bool,
    ) -> list[BackwardTask]:
        """Run backward on all devices from a calling thread that is in the state for it."""
        window = interrupts.window
        grads_of = partial(forward.outputs.shard_grads, grads=output_grads)
        tasks: list[BackwardTask] = []
        for done in forward.done:
            sums = ShardSum(done[0].shard.index if done else 0)
            tasks.append(BackwardTask(grads_of, forward.mode, self.watch, window, retain_graph, sums))

        def work(place: int) -> None:
            done = forward.done[place]
            shards = zip(map(SHARD_OF, done), done, strict=True)
            forward.replicas[place].run(shards, tasks[place], self._streams)

        self._set.run(work, settings=settings, at_once=at_once, waiting=window)
        return tasks

    @torch.no_grad()
    def _combine(self, sums: Sequence[AnyBufferSum], weight: float) -> None:
        """Make what the shards made of the buffers the model's."""
        combine_buffers(sums, self._slots, weight=weight)


@lru_cache(maxsize=64)
def schedule(num_samples: int, num_shards: int | None, workloads: tuple[float, ...]) -> list[list[Shard]]:
    """Cut a batch into shards and give them to devices by `plan.shards_by_device`; last answers are remembered."""
    return plan.shards_by_device([num_samples], num_shards, workloads)


@lru_cache(maxsize=4)
def _alone(grad: bool, inference: bool) -> ThreadSettings:
    """Give the settings of a thread that carries nothing anywhere."""
    return replace(SINGLE_THREAD, grad=grad, inference=inference)


def draw_key() -> int:
    """Draw the key of a forward's random streams from the default generator, or from an open stream."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _check_complete(num_done: int, shards: Sequence[Sequence[Shard]]) -> None:
    """Refuse to go on with a part of the shards."""
    if num_done != sum(map(len, shards)):
        raise OrderError("The group was told to stop before all shards were computed; run the forward again.")
