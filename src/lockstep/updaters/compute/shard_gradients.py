"""Compute the gradient of each shard of one device, and add up what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from lockstep.communicators import Watch
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import Precision, divide_, first_gradient, multiply_, unscale_and_look_
from lockstep.replicas import AnyBufferSum, ShardRunner
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.loss import Loss, LossFunction, check_loss, loss_weight
from lockstep.updaters.result import ShardReport
from lockstep.updaters.setup import call_arguments

NOTHING: Final[AbstractContextManager[None]] = nullcontext()
NO_NAMES: Final[Mapping[str, Any]] = MappingProxyType({})
FORWARD: Final = "forward"
BACKWARD: Final = "backward"


class EarlyReceiver(Protocol):
    """Takes over the sums of a device while backward of its last shard makes them."""

    def watching(
        self, shard: int, before: list[PartialSum], parameters: Sequence[nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Take what backward makes inside of the ``with``, added to the partial sums of the shards before.

        Args:
            shard: The number of the shard.
            before: The sums so far.
            parameters: Those that may get a gradient.
        """

    def end(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Take what backward of the last shard did not reach, but shards before it did.

        Args:
            gradients: What it has made.

        Returns:
            Whether the sums were taken over; the device no longer adds to them.
        """


@dataclass(slots=True)
class GradientTask:
    """What every shard of one attempt is computed by, on whichever device it runs.

    Attributes:
        loss_fn: Called with a replica and the arrays of a shard.
        precision: The policy of number formats.
        lift: What a weight of 1 multiplies the loss by: a power of two that keeps the products with the
            weights below 1, or None where a single shard makes up the update and weights cancel.
        loss_scale: The factor of the loss scale; a tensor where nobody reads it on the host.
        watch: Told what this process is doing.
        mean: Whether the gradient is that of the mean over all shards by their weights; else the gradients
            of the shards' mean losses are summed as they are.
        look: Called with every shard that takes part, its gradients, still scaled, and what it measured.
        deferred: Whether nobody on the host is to learn if the gradient is finite.
        receiver: Takes over the sums of the only device while backward of its last shard makes them, if
            anything does.
        reads_weights: Whether a weight was a tensor, which the host waited for.
    """

    loss_fn: LossFunction
    precision: Precision
    lift: float | None
    loss_scale: float | torch.Tensor
    watch: Watch
    mean: bool = True
    look: Callable[[Shard, Tensors, ShardReport], None] | None = None
    deferred: bool = False
    receiver: EarlyReceiver | None = None
    reads_weights: bool = False

    def factor(self, weight: float) -> float | torch.Tensor:
        """Return what the loss of a shard of this weight is multiplied by before backward."""
        return self.loss_scale * (1.0 if self.lift is None or not self.mean else weight * self.lift)

    def finish(self, reports: Sequence[ShardReport]) -> Callable[[list[torch.Tensor]], bool | None]:
        """Return what divides the sum over these shards by what multiplied it, and tells if all is finite.

        Where nobody is to learn that, it tells None.
        """
        total = 0.0 if self.mean else 1.0
        if self.mean:
            for report in reports:
                total += 1.0 if self.lift is None else report.weight * self.lift
        return partial(divide_ if self.deferred else unscale_and_look_, factor=self.loss_scale * total)


@dataclass(slots=True)
class DeviceGradients:
    """Compute the gradients of the shards of one device, and hold what they add up to; a `ShardTask`.

    Attributes:
        task: What shards are computed by.
        last: The last shard of the device, at whose backward its sums are complete.
        observers: Knows the replica's modules by the names under which they report.
        gradients: The sums, one entry for each parameter that requires a gradient.
        buffers: What became of the buffers.
        reports: What each shard that took part measured.
        samples: How many samples these hold; 1 where a single shard makes up the update.
    """

    task: GradientTask
    last: Shard | None
    observers: Observers
    gradients: ShardSum
    buffers: AnyBufferSum
    reports: list[ShardReport] = field(default_factory=list)
    samples: int = 0
    phase: ClassVar[str] = FORWARD

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Compute the gradient of a shard and add it to those before; one of weight 0 takes no part.

        Args:
            runner: The replica to use.
            shard: Which one.
            given: Its arrays, on the runner's device.

        Raises:
            ReplicaError: User code raised; the original error is the cause.
            TypeError: The loss function returned something that is no loss.
            ValueError: It returned a loss that cannot be used.
        """
        task = self.task
        if runner.buffers.bindings:
            runner.buffers.restore()
        args, kwargs = (given, NO_NAMES) if type(given) is tuple else call_arguments(given)
        task.watch.doing = FORWARD
        try:
            # Closed before backward, where activation checkpointing runs and reports a second time.
            with (
                NOTHING if task.precision.autocast_dtype is None else task.precision.autocast(runner.device.type),
                collecting(self.observers, len(shard.samples)) as reports,
            ):
                returned = task.loss_fn(runner.replica, *args, **kwargs)
        except Exception as error:
            raise runner.error(FORWARD, shard, error) from error
        loss = check_loss(returned)
        weight = loss_weight(loss, len(shard.samples))
        task.reads_weights |= isinstance(loss.weight, torch.Tensor)
        receiver = task.receiver if shard is self.last else None
        rest = self._backward(runner, shard, loss.value, weight, receiver) if weight > 0 else None
        gradients = runner.take_gradients()
        delivered = receiver is not None and receiver.end(gradients)
        if weight > 0:
            if not delivered and (rest is not None or task.precision.held_dtype is not None):
                self._complete(gradients, rest)
            reports.pairs.pop("loss", None)  # it is the loss of the update, whoever else reports it
            metrics = reports.pairs | _detached(loss) if loss.metrics else reports.pairs
            report = ShardReport(shard.index, weight, loss.value.detach(), metrics)
            self._add(runner, shard, report, gradients, delivered=delivered)

    def _backward(
        self,
        runner: ShardRunner,
        shard: Shard,
        loss: torch.Tensor,
        weight: float,
        receiver: EarlyReceiver | None,
    ) -> float | torch.Tensor | None:
        """Leave the gradient of factor times loss in the replica's parameters.

        Returns:
            What the gradients are yet to be multiplied by, if anything.
        """
        first, rest = first_gradient(loss, self.task.factor(weight))
        self.task.watch.doing = BACKWARD
        # To take note only: a shard that has begun is done as a whole.
        runner.replicas.progress.proceed(runner.place, BACKWARD, shard)
        if receiver is None or rest is not None:  # what is yet to be multiplied is not yet what is to be sent
            runner.backward(shard, (loss,), (first,))
        else:
            with receiver.watching(shard.index, self.gradients.partials, runner.parameters):
                runner.backward(shard, (loss,), (first,))
        return rest

    def _complete(self, gradients: Tensors, rest: float | torch.Tensor | None) -> None:
        """Bring gradients to the format in which they are summed, and multiply what is yet to be multiplied."""
        if self.task.precision.held_dtype is not None:
            gradients[:] = [None if gradient is None else gradient.float() for gradient in gradients]
        if rest is not None:
            multiply_(gradients, rest)

    def _add(
        self, runner: ShardRunner, shard: Shard, report: ShardReport, gradients: Tensors, *, delivered: bool
    ) -> None:
        """Add what a shard gave to the sums of the device."""
        task = self.task
        if task.look is not None:
            task.look(shard, gradients, report)
        if not delivered:
            self.gradients.push(shard.index, gradients)
        # A single shard's buffers are taken as they are: x * n / n is not always x.
        share = 1 if task.lift is None else len(shard.samples)
        if runner.buffers.bindings:
            runner.buffers.collect(shard.index, share, self.buffers)
        self.samples += share
        self.reports.append(report)


def _detached(loss: Loss) -> dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Let go of the graphs behind the metrics."""
    return {name: (_detach(total), _detach(weight)) for name, (total, weight) in loss.metrics.items()}


def _detach(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else value
