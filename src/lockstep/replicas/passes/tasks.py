"""The two halves of a shard's work: a forward whose graph is kept, and the backward that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from lockstep import nest
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas.batch import Inputs, ShardForward
from lockstep.replicas.buffers import AnyBufferSum
from lockstep.replicas.passes.shard_runner import ShardRunner
from lockstep.replicas.passes.shard_streams import resume_stream, stream_position
from lockstep.tree import ShardSum, Tensors

NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class ShardObserver(Protocol):
    """What wants to be there while shards are computed; called by the thread that computes."""

    def forward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Give what is entered around the forward of a shard."""

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Give what is entered around the backward of a shard."""


@dataclass(frozen=True, slots=True)
class ModuleMode:
    """How a replica's modules are to run: each as the model's does, or all of them in one mode.

    Attributes:
        training: None for as the model's.
    """

    training: bool | None

    @classmethod
    def wanted(cls, model: nn.Module, *, training: bool | None) -> ModuleMode:
        """Read what the caller wants: modules that the model keeps in evaluation mode stay in it.

        Args:
            model: The original.
            training: True for the modes the model has, or, where it is in evaluation mode as a whole, for
                training mode in all modules; False for evaluation mode in all; None for what the model has.
        """
        as_model = training is None or (training and model.training)
        return cls(None if as_model else training)

    @contextmanager
    def applied(self, replica: nn.Module) -> Iterator[None]:
        """Run a replica's modules in this mode for a while; there is nothing to do where `training` is None."""
        modules = [module for module in replica.modules() if module.training != self.training]
        for module in modules:
            module.training = bool(self.training)
        try:
            yield
        finally:
            for module in modules:
                module.training = not self.training


@dataclass(slots=True)
class ForwardTask:
    """Run forward on the shards of one device, and keep what backward needs; a `ShardTask`.

    Attributes:
        inputs: To be cut.
        mode: How modules run.
        observer: Told of each forward, if anything is.
        window: Entered while the model runs: there an interrupt may be raised.
        keeps_graph: Whether graphs are kept for a later backward.
        buffers: What the shards make of the buffers.
        trained_buffers: The numbers of the buffers that require a gradient.
        done: What each shard left behind.
    """

    inputs: Inputs
    mode: ModuleMode
    observer: ShardObserver | None
    window: AbstractContextManager[None]
    keeps_graph: bool
    buffers: AnyBufferSum
    trained_buffers: Sequence[int] = ()
    done: list[ShardForward] = field(default_factory=list)
    phase: ClassVar[str] = "forward"

    def put_back_buffers(self, runner: ShardRunner) -> list[torch.Tensor]:
        """Let a shard start from the model's buffers; return those that gradients are left in."""
        if self.keeps_graph:
            return runner.buffers.restore_as_new(self.trained_buffers)
        runner.buffers.restore()
        return []

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:  # noqa: ARG002 - the shard says it all
        """Run the model on a shard."""
        replica = runner.replica
        leaves = self.put_back_buffers(runner) if runner.buffers.bindings else []
        with (
            NOTHING if self.mode.training is None else self.mode.applied(replica),
            NOTHING if self.observer is None else self.observer.forward(runner.place, shard, replica),
        ):
            try:
                piece = self.inputs.cut(shard.samples, runner.device)
                with self.window:
                    returned = replica(*piece.args, **piece.kwargs)
            except Exception as error:
                raise runner.error("forward", shard, error) from error
            position = stream_position(runner.device) if self.keeps_graph else None
        self.done.append(ShardForward(shard, piece.leaves, returned, nest.tensors(returned), leaves, position))
        if runner.buffers.bindings:
            # A single shard's buffers are taken as they are: x * n / n is not always x.
            alone = len(shard.samples) == self.inputs.num_samples
            runner.buffers.collect(shard.index, 1 if alone else len(shard.samples), self.buffers)


@dataclass(slots=True)
class BackwardTask:
    """Run backward on the shards of one device, each in its stream from where forward left it; a `ShardTask`.

    Attributes:
        output_grads: Returns the gradient of each tensor a shard returned, on its device; None for none.
        mode: How modules run, should backward run forward again.
        observer: Told of each backward, if anything is.
        window: Entered while backward runs: there an interrupt may be raised.
        retain_graph: Whether backward is to be possible once more.
        sums: The sum of the gradients of parameters and trained buffers, those in half precision as float32.
        inputs: By shard the gradient of each input; None where there is none.
    """

    output_grads: Callable[[ShardForward], Tensors]
    mode: ModuleMode
    observer: ShardObserver | None
    window: AbstractContextManager[None]
    retain_graph: bool
    sums: ShardSum
    inputs: dict[int, Tensors] = field(default_factory=dict)
    phase: ClassVar[str] = "backward"

    def run(self, runner: ShardRunner, shard: Shard, given: ShardForward, /) -> None:
        """Run backward on a shard whose forward is given."""
        replica = runner.replica
        with (
            NOTHING if self.mode.training is None else self.mode.applied(replica),
            NOTHING if self.observer is None else self.observer.backward(runner.place, shard, replica),
        ):
            if given.stream_position is not None:
                resume_stream(given.stream_position, runner.device)
            tensors, gradients = _paired(given.tensors, self.output_grads(given))
            try:
                with self.window:
                    if tensors:
                        runner.backward(shard, tensors, gradients, retain_graph=self.retain_graph)
            finally:
                self.inputs[shard.index] = _take(given.leaves)
        self.sums.push(shard.index, _widened(runner.take_gradients() + _take(given.buffers)))


def _paired(tensors: Sequence[torch.Tensor], gradients: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that have a gradient and a graph, and their gradients."""
    found: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            found.append(tensor)
            theirs.append(gradient)
    return found, theirs


def _take(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    """Take the gradients away from tensors."""
    gradients: Tensors = []
    for tensor in tensors:
        gradients.append(None if tensor is None else tensor.grad)
        if tensor is not None:
            tensor.grad = None
    return gradients


def _widened(gradients: Tensors) -> Tensors:
    """Return gradients in half precision as float32, so that they are summed there and rounded once."""
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.dtype in HALF_PRECISION:
            gradients[index] = gradient.float()
    return gradients
