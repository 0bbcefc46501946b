"""Run shards on one replica, for `ParallelUpdater`, `ReplicaGroup` and `DataParallel`.

What is done with a shard is a `ShardTask`: a forward that keeps its graph, the backward that follows it, or both at
once, as in an update. What surrounds it is the same in all three cases and is defined here: the check whether to stop,
the random stream of the shard, the removal of gradients that a failed backward left behind, and the errors that name
the shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from lockstep import nest
from lockstep.errors import ReplicaError
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas.batch.inputs import Inputs
from lockstep.replicas.batch.outputs import ShardForward
from lockstep.replicas.buffers.buffer_refs import BufferRules
from lockstep.replicas.buffers.buffer_sums import BufferSum
from lockstep.replicas.buffers.replica_buffers import ReplicaBuffers
from lockstep.replicas.passes.leaks import check_no_inner_backward
from lockstep.replicas.passes.shard_streams import ShardStreams, resume_stream, stream_position
from lockstep.replicas.pool.deterministic import cure_of
from lockstep.replicas.pool.devices import NULL_CONTEXT
from lockstep.replicas.pool.progress import samples_text
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.tree import ShardSum, Tensors

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


class ShardHooks(Protocol):
    """The context managers around the forward and backward of each shard, which run in the thread that computes it."""

    def forward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager to enter around the forward of a shard.

        Args:
            place: The index of the device.
            shard: The shard.
            replica: The replica that computes it.
        """

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager to enter around the backward of a shard.

        Args:
            place: The index of the device.
            shard: The shard.
            replica: The replica that computes it.
        """


Around: TypeAlias = Callable[[int, Shard, nn.Module], AbstractContextManager[object]]
"""One of the `ShardHooks`."""


def mode_of(model: nn.Module, *, training: bool | None) -> bool | None:
    """Return whether all modules run in training mode, or None for the modes of the model.

    Modules that the model keeps in evaluation mode stay in it, unless the model is in evaluation mode as a whole.

    Args:
        model: The original model.
        training: True for the modes of the model, or for training mode in all modules if the model is in evaluation
            mode; False for evaluation mode in all modules; None for the modes of the model.
    """
    return None if training is None or (training and model.training) else training


@contextmanager
def in_mode(*models: nn.Module, training: bool) -> Iterator[None]:
    """Set all modules of models to training or evaluation mode, and restore the mode of each at the end.

    Args:
        models: The models.
        training: Whether to set training mode.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, before in modes:
            # By attribute, because `train()` may be overridden and would switch the children too.
            if before != training:
                module.training = training
        yield
    finally:
        for module, before in modes:
            if module.training != before:
                module.training = before


@dataclass(slots=True)
class ForwardTask:
    """A `ShardTask` that runs forward on the shards of one device and keeps what backward needs.

    Attributes:
        inputs: The inputs to split.
        training: The mode of all modules, or None for that of the model.
        around: Returns a context manager to enter around a forward, as `ShardHooks.forward`; None for none.
        interruptible: A context manager to enter while the model runs, during which an interrupt may be raised.
        keeps_graph: Whether graphs are kept for a later backward.
        buffer_sum: The sum of the changes that shards made to the buffers.
        observers: The names of the modules that may report, or None if no reports are collected.
        trained_buffer_indices: The indices of the buffers that require a gradient.
        results: The results of the shards so far.
    """

    inputs: Inputs
    training: bool | None
    around: Around | None
    interruptible: AbstractContextManager[None]
    keeps_graph: bool
    buffer_sum: BufferSum
    observers: Observers | None = None
    trained_buffer_indices: Sequence[int] = ()
    results: list[ShardForward] = field(default_factory=list)
    phase: ClassVar[str] = "forward"

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:  # noqa: ARG002 - a forward needs only the shard
        """Run the model on a shard.

        Args:
            runner: The replica to use.
            shard: The shard.
            given: This argument is not used.
        """
        replica = runner.replica
        buffer_leaves: list[torch.Tensor] = []
        if runner.buffers.entries and self.keeps_graph:
            buffer_leaves = runner.buffers.restore_as_new(self.trained_buffer_indices)
        elif runner.buffers.entries:
            runner.buffers.restore()
        with (
            NULL_CONTEXT if self.training is None else in_mode(replica, training=self.training),
            NULL_CONTEXT if self.around is None else self.around(runner.place, shard, replica),
            NULL_CONTEXT if self.observers is None else collecting(self.observers, len(shard.samples)) as reported,
        ):
            try:
                inputs = self.inputs.shard_inputs(shard.samples, runner.device)
                with self.interruptible:
                    returned = replica(*inputs.args, **inputs.kwargs)
            except Exception as error:
                raise runner.error("forward", shard, error) from error
            if any(parameter.grad is not None for parameter in runner.parameters):
                check_no_inner_backward(replica)
            # Recorded inside of the hooks' context, right after the forward, where backward has to continue.
            position = stream_position(runner.device) if self.keeps_graph else None
        reports = {} if reported is None else reported.pairs
        self.results.append(
            ShardForward(shard, inputs.leaves, returned, nest.tensors(returned), buffer_leaves, position, reports)
        )
        if runner.buffers.entries:
            # The buffers of a single shard are used as they are, because x * n / n is not always x.
            is_only_shard = len(shard.samples) == self.inputs.num_samples
            runner.buffers.collect(shard.index, 1 if is_only_shard else len(shard.samples), self.buffer_sum)


@dataclass(slots=True)
class BackwardTask:
    """A `ShardTask` that runs backward on the shards of one device, continuing the random stream of each forward.

    Attributes:
        output_grads: A function that returns the gradient of each tensor that a shard returned, on its device, or None.
        training: The mode of all modules, in case backward runs forward again, or None for that of the model.
        around: Returns a context manager to enter around a backward, as `ShardHooks.backward`; None for none.
        interruptible: A context manager to enter while backward runs, during which an interrupt may be raised.
        retain_graph: Whether backward can be run again.
        sums: The sum of the gradients of parameters and trained buffers, with those in half precision as float32.
        input_gradients: By shard the gradient of each input, or None.
    """

    output_grads: Callable[[ShardForward], Tensors]
    training: bool | None
    around: Around | None
    interruptible: AbstractContextManager[None]
    retain_graph: bool
    sums: ShardSum
    input_gradients: dict[int, Tensors] = field(default_factory=dict)
    phase: ClassVar[str] = "backward"

    def run(self, runner: ShardRunner, shard: Shard, given: ShardForward, /) -> None:
        """Run backward on a shard.

        Args:
            runner: The replica to use.
            shard: The shard.
            given: The result of the forward of the shard.
        """
        replica = runner.replica
        with (
            NULL_CONTEXT if self.training is None else in_mode(replica, training=self.training),
            NULL_CONTEXT if self.around is None else self.around(runner.place, shard, replica),
        ):
            # Activation checkpointing draws again what forward drew, and a custom backward may draw too.
            if given.stream_position is not None:
                resume_stream(given.stream_position, runner.device)
            tensors, gradients = _paired(given.tensors, self.output_grads(given))
            try:
                with self.interruptible:
                    if tensors:
                        runner.backward(shard, tensors, gradients, retain_graph=self.retain_graph)
            finally:
                # Also after an error, so that a gradient does not stay in a leaf and get added to by a second backward.
                self.input_gradients[shard.index] = _pop_gradients(given.leaves)
        self.sums.push(shard.index, _to_float32(runner.pop_gradients() + _pop_gradients(given.buffer_leaves)))


def _paired(tensors: Sequence[torch.Tensor], gradients: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that have a gradient and a graph, and their gradients."""
    found: list[torch.Tensor] = []
    found_grads: list[torch.Tensor] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            found.append(tensor)
            found_grads.append(gradient)
    return found, found_grads


def _pop_gradients(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    """Remove the gradients from tensors and return them."""
    gradients: Tensors = []
    for tensor in tensors:
        gradients.append(None if tensor is None else tensor.grad)
        if tensor is not None:
            tensor.grad = None
    return gradients


def _to_float32(gradients: Tensors) -> Tensors:
    """Return gradients in half precision as float32, in which they are summed, so that they are rounded only once."""
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.dtype in HALF_PRECISION:
            gradients[index] = gradient.float()
    return gradients
