"""The two halves of the work on a shard: a forward that keeps its graph, and the backward that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lockstep import nest
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas.batch.inputs import Inputs
from lockstep.replicas.batch.outputs import ShardForward
from lockstep.replicas.buffers.buffer_sums import BufferSum
from lockstep.replicas.passes.leaks import check_no_inner_backward
from lockstep.replicas.passes.shard_runner import ShardRunner
from lockstep.replicas.passes.shard_streams import resume_stream, stream_position
from lockstep.replicas.pool.devices import NULL_CONTEXT
from lockstep.tree import ShardSum, Tensors


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
        hooks: The hooks around each forward, or None.
        interruptible: A context manager to enter while the model runs, during which an interrupt may be raised.
        keeps_graph: Whether graphs are kept for a later backward.
        buffer_sum: The sum of the changes that shards made to the buffers.
        observers: The names of the modules that may report, or None if no reports are collected.
        trained_buffer_indices: The indices of the buffers that require a gradient.
        results: The results of the shards so far.
    """

    inputs: Inputs
    training: bool | None
    hooks: ShardHooks | None
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
            NULL_CONTEXT if self.hooks is None else self.hooks.forward(runner.place, shard, replica),
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
        hooks: The hooks around each backward, or None.
        interruptible: A context manager to enter while backward runs, during which an interrupt may be raised.
        retain_graph: Whether backward can be run again.
        sums: The sum of the gradients of parameters and trained buffers, with those in half precision as float32.
        input_gradients: By shard the gradient of each input, or None.
    """

    output_grads: Callable[[ShardForward], Tensors]
    training: bool | None
    hooks: ShardHooks | None
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
            NULL_CONTEXT if self.hooks is None else self.hooks.backward(runner.place, shard, replica),
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
