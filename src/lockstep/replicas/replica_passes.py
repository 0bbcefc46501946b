"""The forwards and backwards of one replica, shard after shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import ReplicaError
from lockstep.plan import Shard
from lockstep.replicas.at_work import samples_text
from lockstep.replicas.buffers import AnyBufferSum, ReplicaBuffers
from lockstep.replicas.scatter import Inputs
from lockstep.replicas.shard_streams import Stream, resume_stream, stream_position
from lockstep.tree import ShardSum, Tensors

HALF = (torch.float16, torch.bfloat16)


class Watch(Protocol):
    """What wants to be there while shards are computed; called by the thread that computes."""

    def forward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Give what is entered around the forward of a shard."""

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Give what is entered around the backward of a shard."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a replica that works asks of the group it belongs to.

    Attributes:
        stops: Told before each shard what comes and which; where it says yes, the rest is left undone.
        window: Entered while the user's code runs: there an interrupt may be raised.
    """

    stops: Callable[[str, Shard], bool]
    window: AbstractContextManager[None]


@dataclass(slots=True)
class ShardForward:
    """What the forward of one shard left behind.

    Attributes:
        shard: Which one.
        leaves: One entry an input: where backward leaves its gradient, None where none is wanted.
        returned: What the replica returned, with the graph behind it if one was kept.
        tensors: The tensors in that, in order.
        buffers: Where backward leaves the gradients of buffers that require one.
        position: How far the shard's stream was drawn from; None where no graph was kept.
    """

    shard: Shard
    leaves: list[torch.Tensor | None]
    returned: Any
    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor]
    position: list[torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Mode:
    """How a replica's modules are to run: each as the model's does, or all of them in one mode.

    Attributes:
        training: None for as the model's.
    """

    training: bool | None

    @classmethod
    def wanted(cls, model: nn.Module, *, training: bool | None) -> Mode:
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
        """Run a replica's modules in this mode for a while."""
        modules = [module for module in replica.modules() if module.training != self.training]
        for module in modules:
            module.training = bool(self.training)
        try:
            yield
        finally:
            for module in modules:
                module.training = not self.training

    def on(self, replica: nn.Module) -> AbstractContextManager[None]:
        """Do the same, at no cost where there is nothing to do."""
        return nullcontext() if self.training is None else self.applied(replica)


@dataclass(frozen=True, slots=True)
class ReplicaPasses:
    """One replica and what is needed to run shards on it.

    Attributes:
        place: Its number among the group's devices.
        num_places: How many there are.
        device: Where it lives.
        replica: Its copy of the model.
        parameters: Those of its parameters that ask for a gradient.
        buffers: Its buffers.
    """

    place: int
    num_places: int
    device: torch.device
    replica: nn.Module
    parameters: list[nn.Parameter]
    buffers: ReplicaBuffers

    def forward(
        self,
        shards: Sequence[Shard],
        inputs: Inputs,
        *,
        mode: Mode,
        stream: Stream,
        turn: Turn,
        watch: Watch | None,
        trained_buffers: Sequence[int] = (),
    ) -> tuple[list[ShardForward], AnyBufferSum]:
        """Run forward on shards, one after another, each from the same buffers and in its own random stream.

        Args:
            shards: Ascending.
            inputs: To be cut.
            mode: How modules run.
            stream: Opens the random stream of a shard.
            turn: Says whether to go on.
            watch: Entered around each forward.
            trained_buffers: The numbers of the buffers that require a gradient.

        Raises:
            ReplicaError: The replica raised; the original error is the cause.
        """
        first = shards[0].index if shards else 0
        sums = self.buffers.begin(first)
        done = []
        for shard in shards:
            if turn.stops("forward", shard):
                break
            leaves = self._put_back_buffers(trained_buffers)
            observed = nullcontext() if watch is None else watch.forward(self.place, shard, self.replica)
            with mode.on(self.replica), observed:
                done.append(self._forward(shard, inputs, leaves, stream, turn))
            if self.buffers:
                # A single shard's buffers are taken as they are: x * n / n is not always x.
                alone = len(shard.samples) == inputs.num_samples
                self.buffers.take(shard.index, 1 if alone else len(shard.samples), sums)
        return done, sums

    def _put_back_buffers(self, trained: Sequence[int]) -> list[torch.Tensor]:
        if not self.buffers:
            return []
        if torch.is_grad_enabled():
            return self.buffers.renew(trained)
        self.buffers.restore()
        return []

    def _forward(
        self, shard: Shard, inputs: Inputs, buffers: list[torch.Tensor], stream: Stream, turn: Turn
    ) -> ShardForward:
        with stream(shard):
            try:
                piece = inputs.cut(shard.samples, self.device)
                with turn.window:
                    returned = self.replica(*piece.args, **piece.kwargs)
            except Exception as error:
                raise self._error("forward", shard, error) from error
            position = stream_position(self.device) if torch.is_grad_enabled() else None
        return ShardForward(shard, piece.leaves, returned, nest.tensors(returned), buffers, position)

    def backward(
        self,
        done: Sequence[ShardForward],
        output_grads: Callable[[ShardForward], Tensors],
        *,
        mode: Mode,
        stream: Stream,
        turn: Turn,
        watch: Watch | None,
        retain_graph: bool,
    ) -> tuple[ShardSum, dict[int, Tensors]]:
        """Run backward on shards, one after another, each in its stream from where forward left it.

        Args:
            done: Their forwards, ascending.
            output_grads: Gives the gradient of each tensor a shard returned, on its device; None for none.
            mode: How modules run, should backward run forward again.
            stream: Opens the random stream of a shard.
            turn: Says whether to go on.
            watch: Entered around each backward.
            retain_graph: Whether backward is to be possible once more.

        Returns:
            The sum of the gradients of parameters and trained buffers, half precision as float32, and by
            shard the gradient of each input; None where there is none.

        Raises:
            ReplicaError: Backward raised; the original error is the cause.
        """
        sums = ShardSum(done[0].shard.index if done else 0)
        inputs: dict[int, Tensors] = {}
        for each in done:
            shard = each.shard
            if turn.stops("backward", shard):
                break
            observed = nullcontext() if watch is None else watch.backward(self.place, shard, self.replica)
            with mode.on(self.replica), observed, stream(shard):
                if each.position is not None:
                    resume_stream(each.position, self.device)
                try:
                    with turn.window:
                        self._backward(each, output_grads(each), retain_graph=retain_graph)
                except Exception as error:
                    raise self._error("backward", shard, error) from error
                finally:
                    gradients = _take([*self.parameters, *each.buffers])
                    inputs[shard.index] = _take(each.leaves)
            sums.push(shard.index, [_widen(gradient) for gradient in gradients])
        return sums, inputs

    def _backward(self, done: ShardForward, output_grads: Tensors, *, retain_graph: bool) -> None:
        """Leave the gradients in the parameters and leaves."""
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(done.tensors, output_grads, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if not pairs:
            return
        tensors, gradients = zip(*pairs, strict=True)
        # Autograd's own threads for accelerators know nothing of the shard's stream; on CPUs there are none.
        with nullcontext() if self.device.type == "cpu" else torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)

    def _error(self, phase: str, shard: Shard, error: Exception) -> ReplicaError:
        where = f"{self.device} (device {self.place} of 0..{self.num_places - 1})"
        what = f"The {phase} of shard {shard.index} ({samples_text(shard)})"
        return ReplicaError(
            f"{what} raised {type(error).__name__} on {where}: {error}",
            device=str(self.device),
            shard=shard.index,
        )


def _take(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    """Take the gradients away from tensors."""
    gradients: Tensors = []
    for tensor in tensors:
        gradients.append(None if tensor is None else tensor.grad)
        if tensor is not None:
            tensor.grad = None
    return gradients


def _widen(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Let a gradient in half precision be summed in float32, to be rounded once."""
    return gradient.float() if gradient is not None and gradient.dtype in HALF else gradient
