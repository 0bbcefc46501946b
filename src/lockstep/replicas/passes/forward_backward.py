"""Run the forward of a model on the shards of a batch, keep the results, and run backward from them later.

The shards are computed by the replicas of a `ReplicaSet` on all devices at the same time, each in its own random stream
and starting from the same buffers, as in an update. Unlike in an update, forward and backward are separate: a
`Forward` keeps the graph of each shard and the state of its random stream, from which `ForwardBackward.backward`
continues.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import plan
from lockstep.digest import checksums
from lockstep.errors import OrderError, RandomStreamWarning, few, warn
from lockstep.metrics import collecting
from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import BatchDim, Inputs
from lockstep.replicas.batch.outputs import Outputs, ShardForward, read_outputs
from lockstep.replicas.buffers.buffer_refs import BufferRef, BufferRules, buffer_refs, check_rules, trained_buffers
from lockstep.replicas.buffers.buffer_sums import BufferSum, combine_buffers
from lockstep.replicas.buffers.replica_buffers import check_buffers, warn_of_means
from lockstep.replicas.passes.forward_check import ForwardCheck, warn_of_lists
from lockstep.replicas.passes.leaks import check_no_leaked_graphs, refusing_writes
from lockstep.replicas.passes.shard_runner import (
    Around,
    BackwardTask,
    ForwardTask,
    ShardHooks,
    ShardRunner,
    create_runner,
    create_runners,
    mode_of,
)
from lockstep.replicas.passes.shard_streams import ShardStreams
from lockstep.replicas.passes.summing import TreeSum
from lockstep.replicas.pool.interrupts import CallSigint
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.settings import SINGLE_THREAD, ComputeMode, ThreadSettings, inherited
from lockstep.streams import DRAWS, moved, python_states
from lockstep.tree import PartialSum, ShardSum, Tensors

SHARD_OF: Final = attrgetter("shard")

CHECKED: Final = 4
"""The number of first training forwards that are checked. In the last of them the model is called more often, which
programs of a few forwards, such as those that count calls, do not see."""


@dataclass(slots=True)
class Forward:
    """A forward that was run, with everything that its backward needs.

    Attributes:
        inputs: The inputs of the model.
        shards: The shards of each device, in order.
        seed: The seed of the random streams of the shards.
        training: The mode of all modules, or None for that of the model.
        settings: The settings under which the threads computed.
        runners: The runners of the replicas that ran it.
        trained_tensors: The parameters of the model that require a gradient, by name and in the order of those of the
            replicas, followed by the buffers that require one.
        trained_buffer_indices: The indices of these buffers.
        has_graph: Whether backward can be run.
        results: The results of the shards of each device.
    """

    inputs: Inputs
    shards: list[list[Shard]]
    seed: int
    training: bool | None
    settings: ThreadSettings
    runners: list[ShardRunner]
    trained_tensors: list[tuple[str, torch.Tensor]]
    trained_buffer_indices: list[int]
    has_graph: bool
    results: list[list[ShardForward]] = field(default_factory=list)
    outputs: Outputs = field(init=False)
    """The outputs of the shards, ready to be merged."""
    dependent: dict[int, str] = field(default_factory=dict)
    """What outputs are that are seen to depend on how the batch is split, by their indices."""


@dataclass(slots=True)
class Backward:
    """The gradients of a backward.

    Attributes:
        device_sums: For each device the sums over its shards, with one entry for each of `Forward.trained_tensors`,
            where half precision is float32.
        input_gradients: The gradient of the part of each input, by the index of the shard.
        tree_sum: The object that sums in the threads of the replicas.
    """

    device_sums: list[ShardSum]
    input_gradients: dict[int, Tensors]
    tree_sum: TreeSum

    def device_total(self, place: int) -> Tensors:
        """Return the gradients of the parameters summed over the shards of one device, keeping the partial sums.

        Args:
            place: The index of the device.
        """
        partials = self.device_sums[place].partials
        return self.tree_sum.total(partials, keep=True) if partials else []

    def total(self, *, keep: bool) -> Tensors:
        """Return the gradients of the parameters summed over all shards in the order of the tree, on the first device.

        Args:
            keep: Whether to leave the sums of the devices unchanged instead of adding to them in place.
        """
        partials: list[PartialSum] = []
        for device_sum in self.device_sums:
            partials += device_sum.partials
        return self.tree_sum.total(partials, keep=keep)


class ForwardBackward:
    """The forward and backward of a model on the devices of a `ReplicaSet`.

    Args:
        replicas: The copies of the model and their threads.
        buffers: The rule by which the buffers of shards are combined (see `replicas.buffers`).
    """

    def __init__(self, replicas: ReplicaSet, *, buffers: BufferRules = "mean") -> None:
        check_rules(buffers)
        self.replicas = replicas
        self._rules: BufferRules = buffers
        self._streams = ShardStreams(replicas.devices)
        # Threads of the user take turns. Reentrant, because a hook may run forward or backward again.
        self._lock = threading.RLock()
        self._runners: list[ShardRunner] = []
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._tree_sum = TreeSum(replicas, [])
        self._buffer_refs: list[BufferRef] = []
        self._checked_for_leaks = self._checked_buffers = self._checked_backward = False
        self._unchecked = CHECKED
        self.shard_hooks: ShardHooks | None = None
        """The hooks that run around the forward and the backward of each shard, or None, which costs nothing."""

    def forward(
        self, inputs: Inputs, *, num_shards: int | None = None, training: bool | None = None, output_dim: BatchDim = 0
    ) -> Forward:
        """Run forward on all shards of a batch, and combine the buffers.

        A graph is kept if the calling thread has gradients enabled. Any number of forwards may exist at the same time.

        Args:
            inputs: The batch.
            num_shards: The number of shards, or None for one per device, sized by its workload.
            training: The mode in which modules run (see `mode_of`).
            output_dim: The dimension along which each output is merged (see `read_outputs`).

        Raises:
            OrderError: If the replicas are closed, or were asked to stop.
            ReplicaError: If the model raised in a shard, or a device hangs.
            ReplicaInterrupt: If Ctrl-C was pressed. Except for the seed that was drawn, nothing has changed.
            TypeError: If the model returned a value that cannot be merged.
            ValueError: If an output has the wrong shape, or the model computes with the parameters of the original
                model, or writes to its parameters.

        Determinism: If `num_shards` is given, the bits of all outputs and buffers depend only on the batch, the model,
        that number and the drawn seed, and not on devices or workloads.
        """
        with self._lock, CallSigint() as interrupts, ComputeMode(self._settings()) as settings:
            self._update_replicas()
            buffers: dict[int, tuple[str, torch.Tensor]] = {}
            if self._buffer_refs and settings.grad and not inputs.attached:
                buffers = trained_buffers(self.replicas.model, self._buffer_refs, frozen=self.replicas.frozen)
            forward = Forward(
                inputs,
                shards_of_batch(inputs.num_samples, num_shards, tuple(self.replicas.workloads)),
                # From the default generator, or from the stream of the shard that this forward is a part of.
                int(torch.randint(2**63 - 1, (), device="cpu")),
                mode_of(self.replicas.model, training=training),
                settings,
                self._runners,
                [*self._parameters, *buffers.values()],
                list(buffers),
                has_graph=settings.grad,
            )

            run = partial(self._forward, forward, interrupts)
            collector = collecting.current()
            # An updater whose loss function runs this checks for itself.
            counts = bool(self._unchecked and forward.has_graph and forward.trained_tensors) and collector is None
            counts = counts and self._trains(forward)
            is_first, is_last = self._unchecked == CHECKED, self._unchecked == 1
            checks = counts and (is_first or is_last)
            given, before = (_seals(inputs), python_states()) if checks else ([], {})
            with refusing_writes(self.replicas) if checks else nullcontext():
                sums = self._streams.run(run, seed=forward.seed, parallel=self.replicas.wants_threads(forward.shards))
            names = moved(before, python_states()) if checks else []
            if names:
                warn(DRAWS.format("The model draws", " and ".join(names)), RandomStreamWarning)
            in_order = list(chain.from_iterable(forward.results))
            _check_complete(len(in_order), forward.shards)
            # Once per set of replicas is enough, because it depends on the structure of the model.
            if forward.has_graph and not inputs.attached and not self._checked_for_leaks:
                own = {id(parameter): name for name, parameter in forward.trained_tensors}
                runs = zip(forward.runners, forward.results, strict=True)
                replica = next(runner.replica for runner, run in runs if run)
                check_no_leaked_graphs(in_order[0].tensors, replica, own)
                self._checked_for_leaks = True
            forward.outputs = read_outputs(in_order, inputs.num_samples, output_dim)
            self._unchecked -= counts
            if checks and not names and len(in_order) > 1 and given == _seals(inputs):
                # What writes to its inputs returns something else for them the next time. In the last forward, because
                # what a replica stores decides later; where there may be a loss, in the first one, too.
                if is_first:
                    warn_of_lists(inputs)
                if is_last or any(each.dim() == 0 and each.requires_grad for each in in_order[0].tensors):
                    forward.dependent = self._check(forward, interrupts)
            if names or forward.dependent:
                # Warned of once.
                self._unchecked = 0
            # Inside of a shard that is split further here, what its parts report counts as one report.
            if collector is not None:
                collector.add([each.reports for each in in_order])
            # Last, after everything that can fail: buffers are the only state of the model that a forward changes.
            if self._buffer_refs:
                self._combine(sums, forward, alone=len(in_order) == 1)
            return forward

    def backward(
        self, forward: Forward, output_grads: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> Backward:
        """Run backward on all shards, each in the thread of its device.

        Args:
            forward: The forward. Its graphs are freed, unless they are to be retained.
            output_grads: The gradient of each merged output, or None.
            retain_graph: Whether backward can be run again.

        Raises:
            OrderError: If there is no graph, or the replicas are closed, or were asked to stop.
            ReplicaError: If backward raised in a shard, or a device hangs.
            ReplicaInterrupt: If Ctrl-C was pressed.

        Determinism: The same as for `forward`.
        """
        if not forward.has_graph:
            raise OrderError(
                "backward must follow a forward with gradients enabled, and can follow each forward once. To run it "
                "again, call backward(retain_graph=True) the first time."
            )
        # Before the run, because a backward that fails has freed some of the graphs.
        forward.has_graph = retain_graph
        graphs_used = False

        def run(*, parallel: bool) -> list[BackwardTask]:
            nonlocal graphs_used
            # A first run that drew from the default generator was discarded, but it has freed the graphs.
            if graphs_used:
                with inherited(forward.settings):
                    self._forward(forward, interrupts, parallel=parallel)
            graphs_used = True
            return self._backward(
                forward, output_grads, settings, interrupts, retain_graph=retain_graph, parallel=parallel
            )

        with self._lock, CallSigint() as interrupts, ComputeMode(self._settings()) as settings:
            # Replicas that were replaced since this forward keep the parameters of its graph.
            if forward.runners is self._runners:
                self.replicas.sync_for_backward()
            tasks = self._streams.run(run, seed=forward.seed, parallel=self.replicas.wants_threads(forward.shards))
        input_gradients: dict[int, Tensors] = {}
        for task in tasks:
            input_gradients.update(task.input_gradients)
        _check_complete(len(input_gradients), forward.shards)
        return Backward([task.sums for task in tasks], input_gradients, self._tree_sum)

    def release(self) -> None:
        """Drop the replicas, and restore the random kernels of torch, until the next forward."""
        self._runners = []
        self._streams.release()

    def _trains(self, forward: Forward) -> bool:
        return self.replicas.model.training if forward.training is None else forward.training

    def _settings(self) -> ThreadSettings:
        """Return the settings of the calling thread, as far as other threads need them."""
        if self.replicas.uses_threads:
            return ThreadSettings.capture(self.replicas.device_types, self.replicas.accelerators)
        return _single_thread_settings(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def _update_replicas(self) -> None:
        """Create everything that depends on the replicas again if the model has changed."""
        if not self.replicas.refresh() and self._runners:
            return
        model = self.replicas.model
        pairs = zip(model.named_parameters(), self.replicas.replicas[0].parameters(), strict=True)
        self._parameters = [named for named, copied in pairs if copied.requires_grad]
        self._tree_sum = TreeSum(self.replicas, [parameter.numel() for _, parameter in self._parameters])
        self._buffer_refs = buffer_refs(model, self._rules)
        self._checked_for_leaks = self._checked_buffers = self._checked_backward = False
        self._unchecked = CHECKED
        self._runners = create_runners(self.replicas, self._rules)

    def _forward(self, forward: Forward, interrupts: CallSigint, *, parallel: bool) -> list[BufferSum]:
        """Run forward on all devices from a calling thread that has its settings."""
        settings = forward.settings
        interruptible = interrupts.interruptible
        collector = collecting.current()
        compared: dict[str, set[int]] | None = None
        if self._buffer_refs and settings.grad and not self._checked_buffers and self._trains(forward):
            # Without values there is nothing to compare.
            compared = None if any(each.is_meta for each in self.replicas.model.buffers()) else {}
        for runner in forward.runners:
            runner.buffers.compared = compared
        tasks = [
            ForwardTask(
                forward.inputs,
                forward.training,
                None if self.shard_hooks is None else self.shard_hooks.forward,
                interruptible,
                settings.grad,
                runner.buffers.start_shards(shards[0].index if shards else 0),
                None if collector is None else collector.observers,
                forward.trained_buffer_indices,
            )
            for runner, shards in zip(forward.runners, forward.shards, strict=True)
        ]

        def work(place: int) -> None:
            shards = forward.shards[place]
            forward.runners[place].run(zip(shards, shards, strict=True), tasks[place], self._streams)

        self.replicas.run(work, settings=settings, parallel=parallel, waiting=interruptible)
        forward.results = [task.results for task in tasks]
        return [task.buffer_sum for task in tasks]

    def _check(self, forward: Forward, interrupts: CallSigint) -> dict[int, str]:
        """Check a forward by a new copy of the model; return what outputs depend on how the batch is split."""
        place = max(range(len(forward.results)), key=lambda each: len(forward.results[each]))
        runner = create_runner(self.replicas, place, self.replicas.new_replica(place), self._rules)
        # The parts of the caller's graph are those of the shards.
        inputs, settings = replace(forward.inputs, attached=None), forward.settings

        def run(shards: Sequence[Shard], around: Around | None) -> list[ShardForward]:
            def compute(*, parallel: bool) -> list[ShardForward]:
                sums, indices = runner.buffers.start_shards(shards[0].index), forward.trained_buffer_indices
                waiting = interrupts.interruptible
                task = ForwardTask(inputs, forward.training, around, waiting, settings.grad, sums, None, indices)

                def work(at: int) -> None:
                    runner.run([(each, each) for each in shards if at == place], task, self._streams)

                self.replicas.run(work, settings=settings, parallel=parallel, waiting=waiting)
                return task.results

            return self._streams.run(compute, seed=forward.seed, parallel=self.replicas.wants_threads(forward.shards))

        check = ForwardCheck(runner, run, forward.outputs)
        return check.check(forward.results[place][-1], forward.runners[place].buffers.left())

    def _backward(
        self,
        forward: Forward,
        output_grads: Sequence[torch.Tensor | None],
        settings: ThreadSettings,
        interrupts: CallSigint,
        *,
        retain_graph: bool,
        parallel: bool,
    ) -> list[BackwardTask]:
        """Run backward on all devices from a calling thread that has the right settings."""
        interruptible = interrupts.interruptible
        grads_of = partial(forward.outputs.shard_grads, grads=output_grads)
        around = None if self.shard_hooks is None else self.shard_hooks.backward
        tasks: list[BackwardTask] = []
        for results in forward.results:
            sums = ShardSum(results[0].shard.index if results else 0)
            tasks.append(BackwardTask(grads_of, forward.training, around, interruptible, retain_graph, sums))

        def work(place: int) -> None:
            results = forward.results[place]
            shards = zip(map(SHARD_OF, results), results, strict=True)
            forward.runners[place].run(shards, tasks[place], self._streams)

        # The hooks of saved tensors of a forward in the calling thread, if there are any, run in backward.
        parallel = parallel and not forward.settings.kept
        watched: list[tuple[str, torch.Tensor, int]] = []
        if self._buffer_refs and not self._checked_backward:
            modules = [named for runner in forward.runners for named in runner.replica.named_modules()]
            watched = [
                (name, buffer, buffer._version)
                for path, module in modules
                # A checkpoint computes batch statistics once more, which count once.
                if not isinstance(module, _BatchNorm)
                for name, buffer in module.named_buffers(path, recurse=False)
            ]
        self.replicas.run(work, settings=settings, parallel=parallel, waiting=interruptible)
        self._checked_backward = True
        if changed := dict.fromkeys(name for name, buffer, version in watched if buffer._version != version):
            warn(
                f"Backward changes buffers of the model: {few([*changed])}. Those of the shards are combined after "
                "forward, so these changes are lost. Change them in forward, or train with a ParallelUpdater, which "
                "combines them after backward."
            )
        return tasks

    @torch.no_grad()
    def _combine(self, sums: Sequence[BufferSum], forward: Forward, *, alone: bool) -> None:
        """Write the combined buffers of the shards to the model."""
        compared = None if alone else forward.runners[0].buffers.compared
        sizes = () if compared is None else [len(shard.samples) for shard in chain(*forward.shards)]
        check_buffers(sums, self._buffer_refs, sizes)
        if compared is not None:
            self._checked_buffers = True
            warn_of_means(compared)
        combine_buffers(sums, self._buffer_refs, weight=1 if alone else forward.inputs.num_samples)


@lru_cache(maxsize=64)
def shards_of_batch(num_samples: int, num_shards: int | None, workloads: tuple[float, ...]) -> list[list[Shard]]:
    """Return the shards of each device for one batch, as `plan.shards_by_device` does. Recent results are cached.

    Args:
        num_samples: The number of samples of the batch.
        num_shards: The number of shards, or None for one per device.
        workloads: The relative speeds of the devices.
    """
    return plan.shards_by_device([num_samples], num_shards, workloads)


@lru_cache(maxsize=4)
def _single_thread_settings(grad: bool, inference: bool) -> ThreadSettings:
    """Return the settings of a thread whose work runs in no other thread."""
    return replace(SINGLE_THREAD, grad=grad, inference=inference)


def _seals(inputs: Inputs) -> list[int]:
    """Return the checksums of inputs."""
    return checksums(each for each in inputs.tensors if each.layout is torch.strided and not each.is_meta)


def _check_complete(num_done: int, shards: Sequence[Sequence[Shard]]) -> None:
    """Check that all shards were computed.

    Args:
        num_done: The number of shards that were computed.
        shards: The shards of each device.

    Raises:
        OrderError: If some shards were skipped.
    """
    if num_done != sum(map(len, shards)):
        raise OrderError("The group was asked to stop before all shards were computed. Run the forward again.")
