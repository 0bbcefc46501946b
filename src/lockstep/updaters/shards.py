"""Compute the shards of one place: forward, backward, and the place's partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from lockstep.errors import ReplicaError
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import Precision, divide_, first_gradient, multiply_, unscale_and_look_
from lockstep.replicas.buffers import AnyBufferSum, ReplicaBuffers
from lockstep.tree import ShardSum, Tensors
from lockstep.updaters.batches import call_arguments
from lockstep.updaters.loss import Loss, LossFunction, check_loss, loss_weight
from lockstep.updaters.overlap import Delivery
from lockstep.updaters.result import ShardReport

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(slots=True)
class Instructions:
    """What every shard of one try is computed by, wherever it runs.

    Attributes:
        loss_fn: Called with a replica and the arrays of a shard.
        precision: The policy of number formats.
        lift: What a weight of 1 multiplies the loss by: a power of two that keeps the products with the
            weights below 1, or None where a single shard makes up the update and weights cancel.
        loss_scale: The factor of the loss scale; a tensor where nobody reads it on the host.
        mean: Whether the gradient is that of the mean over all shards by their weights; else the gradients
            of the shards' mean losses are summed up as they are.
        look: Shown every shard that takes part, with its gradients still scaled and what it measured.
        unread: Whether nobody on the host is to learn if the gradient is finite.
        delivery: Takes the sums of the only place while backward of its last shard makes them, if anything.
        reads_weights: Whether a weight was a tensor, which the host waited for.
    """

    loss_fn: LossFunction
    precision: Precision
    lift: float | None
    loss_scale: float | torch.Tensor
    mean: bool = True
    look: Callable[[Shard, Tensors, ShardReport], None] | None = None
    unread: bool = False
    delivery: Delivery | None = None
    reads_weights: bool = False

    def factor(self, weight: float) -> float | torch.Tensor:
        """Give what the loss of a shard of this weight is multiplied by before backward."""
        return self.loss_scale * self._share(weight)

    def finish(self, reports: Sequence[ShardReport]) -> Callable[[Sequence[torch.Tensor]], bool | None]:
        """Make what divides the sum over these shards by what multiplied it, and tells if all is finite.

        Where nobody is to learn that, it tells None.
        """
        total = sum([self._share(report.weight) for report in reports]) if self.mean else 1.0
        return partial(divide_ if self.unread else unscale_and_look_, factor=self.loss_scale * total)

    def _share(self, weight: float) -> float:
        return 1.0 if self.lift is None or not self.mean else weight * self.lift


@dataclass(slots=True)
class PlaceSums:
    """What the shards of one place add up to.

    Attributes:
        gradients: One entry a parameter that asks for a gradient.
        buffers: What became of the buffers.
        reports: What each shard measured.
        samples: How many samples the shards that took part hold; 1 where there is a single shard.
    """

    gradients: ShardSum
    buffers: AnyBufferSum
    reports: list[ShardReport] = field(default_factory=list)
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """One replica and what is needed to run shards on it.

    Attributes:
        device: Where it lives.
        replica: Its copy of the model.
        parameters: Those of its parameters that ask for a gradient.
        buffers: Its buffers.
        observers: Knows its modules by the names under which they report.
        phase: Told what is being done.
    """

    device: torch.device
    replica: nn.Module
    parameters: list[nn.Parameter]
    buffers: ReplicaBuffers
    observers: Observers
    phase: Callable[[str], None]

    def run(
        self,
        work: Sequence[tuple[Shard, Any]],
        instructions: Instructions,
        stream: Callable[[Shard], AbstractContextManager[object]],
        stops: Callable[[str, Shard], bool],
    ) -> PlaceSums:
        """Compute shards one after another, each from the same buffers and in its own random stream.

        Args:
            work: Shards with their arrays on this device, ascending.
            instructions: What they are computed by.
            stream: Opens the random stream of a shard.
            stops: Told what comes next and with which shard; where it says yes before a shard, the rest is
                left undone.

        Raises:
            ReplicaError: User code raised in a shard; the original error is the cause.
            TypeError: The loss function returned something that is no loss.
            ValueError: It returned a loss that cannot be used.
        """
        first = work[0][0].index if work else 0
        sums = PlaceSums(ShardSum(first), self.buffers.begin(first, unread=instructions.unread))
        for shard, arrays in work:
            if stops("forward", shard):
                break
            if self.buffers:
                self.buffers.restore()
            last = instructions.delivery if shard is work[-1][0] else None
            try:
                with stream(shard):
                    report, rest = self._forward_backward(
                        shard, arrays, instructions, sums.gradients, last, stops=stops
                    )
            except BaseException:
                self._take_gradients()  # backward may have come halfway, and the next one would add to that
                raise
            gradients = self._take_gradients()
            delivered = last is not None and last.end(gradients)
            if not delivered:
                gradients = _completed(gradients, instructions, rest)
            if report.weight > 0:
                if instructions.look is not None:
                    instructions.look(shard, gradients, report)
                if not delivered:
                    sums.gradients.push(shard.index, gradients)
                # A single shard's buffers are taken as they are: x * n / n is not always x.
                share = 1 if instructions.lift is None else len(shard.samples)
                if self.buffers:
                    self.buffers.take(shard.index, share, sums.buffers)
                sums.samples += share
                sums.reports.append(report)
        return sums

    def _forward_backward(
        self,
        shard: Shard,
        arrays: Any,
        instructions: Instructions,
        before: ShardSum,
        delivery: Delivery | None,
        *,
        stops: Callable[[str, Shard], bool],
    ) -> tuple[ShardReport, float | torch.Tensor | None]:
        """Leave the gradient of factor times loss in the replica's parameters, unless the weight is 0.

        Returns:
            What was measured, and what the gradients are yet to be multiplied by, if anything.
        """
        args, kwargs = call_arguments(arrays)
        self.phase("forward")
        try:
            # Closed before backward, where activation checkpointing runs and reports a second time.
            with (
                instructions.precision.autocast(self.device.type),
                collecting(self.observers, len(shard.samples)) as reports,
            ):
                returned = instructions.loss_fn(self.replica, *args, **kwargs)
        except Exception as error:
            raise self._error("forward", shard, error) from error
        loss = check_loss(returned)
        weight = loss_weight(loss, len(shard.samples))
        instructions.reads_weights |= isinstance(loss.weight, torch.Tensor)
        rest = None
        if weight > 0:
            first, rest = first_gradient(loss.value, instructions.factor(weight))
            self.phase("backward")
            stops("backward", shard)  # to take note only: a shard that has begun is done as a whole
            if rest is not None:
                delivery = None  # what is yet to be multiplied is not yet what is to be sent
            bringing = delivery and delivery.watching(shard.index, before.partials, self.parameters)
            with bringing or _NOTHING:
                try:
                    _backward(loss.value, first)
                except Exception as error:
                    raise self._error("backward", shard, error) from error
        reports.pairs.pop("loss", None)  # it is the loss of the update, whoever else reports it
        metrics = reports.pairs | _detached(loss) if loss.metrics else reports.pairs
        return ShardReport(shard.index, weight, loss.value.detach(), metrics), rest

    def _take_gradients(self) -> Tensors:
        """Take the fresh gradients away from the replica; None where backward did not reach."""
        gradients: Tensors = []
        for parameter in self.parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def _error(self, phase: str, shard: Shard, error: Exception) -> ReplicaError:
        first, last, step = shard.samples[0], shard.samples[-1], shard.samples.step
        apart = f" in steps of {step}" if step > 1 else ""
        samples = f"samples {first}..{last}{apart} of batch {shard.batch}"
        return ReplicaError(
            f"The {phase} of shard {shard.index} ({samples}) raised {type(error).__name__} on {self.device}: "
            f"{error}",
            device=str(self.device),
            shard=shard.index,
        )


def _completed(gradients: Tensors, instructions: Instructions, rest: float | torch.Tensor | None) -> Tensors:
    """Bring gradients to the format in which they are summed, and multiply what is yet to be multiplied."""
    if instructions.precision.held_dtype is not None:
        gradients = [None if gradient is None else gradient.float() for gradient in gradients]
    if rest is not None:
        multiply_(gradients, rest)
    return gradients


def _backward(loss: torch.Tensor, first: torch.Tensor | None) -> None:
    """Run backward from the first gradient, in the calling thread and so in its shard's stream."""
    if type(loss) is torch.Tensor and loss.is_cpu:
        # As `backward` does, without its look at arguments that fit: forty lines of Python, for which shards
        # in other threads would wait.
        first = torch.ones_like(loss) if first is None else first
        _engine_run_backward(
            (loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward(first)  # type: ignore[no-untyped-call]  # torch's gap


def _detached(loss: Loss) -> dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Let go of the graphs behind the metrics."""
    return {name: (_detach(total), _detach(weight)) for name, (total, weight) in loss.metrics.items()}


def _detach(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else value
