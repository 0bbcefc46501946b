"""Compute the gradient of each shard of one device and add these gradients up, or compute its outputs alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Final
from weakref import ref

import torch
from torch.nn.utils import parametrize

from lockstep.communicators import Watch
from lockstep.metrics import Observers, collecting
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.precision import Precision, divide_, initial_gradient, multiply_, unscale_and_check_
from lockstep.replicas import BufferSum, NoMeans, ShardRunner, check_no_inner_backward, foreign_leaves
from lockstep.tree import ShardSum, Tensors
from lockstep.updaters.compute.early_send import DeviceSend, EarlySend, GradientMerge
from lockstep.updaters.loss import Loss, LossFunction, check_loss, explained, loss_weight, metric_pairs, warn_of_rows
from lockstep.updaters.result import ShardReport
from lockstep.updaters.state.carried import CarriedAttempt

NO_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()
NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})
GRADIENT: Final = attrgetter("grad")
FORWARD: Final = "forward"
BACKWARD: Final = "backward"


@dataclass
class GradientContext:
    """What all shards of one attempt have in common, on whichever device they run.

    Attributes:
        loss_fn: Called with a replica and the tensors of a shard; returns the loss.
        precision: The precision policy.
        num_samples: The number of samples of the update; None where a single shard makes up the update and its weight
            cancels.
        loss_scale_factor: The factor of the loss scale; a tensor where the host does not read it.
        watch: Where this process records what it is doing.
        mean: Whether the gradient is that of the weighted mean over all shards. Otherwise the gradients of the shards'
            mean losses are summed.
        weighted: Whether numbers of samples are weights like those that the loss function returns for other shards.
        is_mixed: Whether the shards' gradients cannot be added, because it returned weights for some of them and
            `weighted` is False, or the reverse.
        inspect_shard: Called with every shard that takes part, its gradients, still scaled, and its report.
        deferred: Whether the overflow check stays on the device.
        early_send: Sends the sums of the devices during backward of their last shards; None where they are not sent
            early.
        has_tensor_weights: Whether the weight of a loss was a tensor, for which the host had to wait.
        carried: Exchanges values with the loss function that are carried from batch to batch; None if there are none.
        shard_loss: Returns the loss function of a shard; None if it is `loss_fn` for all of them.
        is_first: Whether this is one of the first updates, in which there are more checks.
        at_start: Whether this is the first update after an updater was built or a state was loaded, in which buffers
            are compared even where the host has to wait for a device.
        merges: Whether large gradients are added to the sums of earlier shards during backward.
        inspected: The only shards of which `inspect_shard` reads the gradients; None for all.
        foreign_leaves: Receives what gets a gradient beside the parameters of a replica, in the first updates.
        options: The options of the optimizers before the shards run, by name, in the first updates.
        original_reads: Receives what is read from the original model while the shards run, in the first updates, by the
            ``id`` of the module and the name of the attribute, with the function that reads it.
        no_means: Receives what losses are that are no mean over samples; None where nothing looks at them.
    """

    loss_fn: LossFunction
    precision: Precision
    num_samples: int | None
    loss_scale_factor: float | torch.Tensor
    watch: Watch
    mean: bool = True
    weighted: bool = False
    inspect_shard: Callable[[Shard, Tensors, ShardReport], None] | None = None
    deferred: bool = False
    carried: CarriedAttempt | None = None
    shard_loss: Callable[[Shard], LossFunction] | None = None
    merges: bool = True
    # Not set by the constructor, which runs in every attempt.
    is_first: bool = field(default=False, init=False)
    at_start: bool = field(default=False, init=False)
    inspected: Collection[int] | None = field(default=None, init=False)
    is_mixed: bool = field(default=False, init=False)
    early_send: EarlySend | None = field(default=None, init=False)
    has_tensor_weights: bool = field(default=False, init=False)
    foreign_leaves: list[ref[torch.Tensor]] = field(init=False)
    options: Mapping[str, str] = field(init=False)
    original_reads: dict[tuple[int, str], str] = field(init=False)
    no_means: NoMeans | None = field(default=None, init=False)

    def initial_gradient(self, loss: Loss, weight: float) -> tuple[torch.Tensor | None, float | torch.Tensor | None]:
        """Return the gradient with which backward of a shard of this weight starts; see `precision.initial_gradient`.

        Backward of a mean over samples starts with the shard's share of them, and so computes the gradients of the mean
        over the batch.
        """
        num_samples = self.num_samples
        if num_samples is None or not self.mean:
            return initial_gradient(loss.value, self.loss_scale_factor)
        if loss.weight is None and not self.weighted:
            return initial_gradient(loss.value, self.loss_scale_factor, weight, num_samples)
        return initial_gradient(loss.value, self.loss_scale_factor * (weight / self._divisor(own_weights=True)))

    def _divisor(self, *, own_weights: bool) -> int:
        """Return what weights are divided by before backward: the number of samples, which is the sum of the weights.

        The sum of weights that loss functions return is only known after all forwards. Until the division by this sum,
        the smallest power of two that is not below the number of samples stands in, which cancels exactly and keeps the
        quotients at most 1 where weights count samples.
        """
        num_samples = self.num_samples or 1
        return 1 << (num_samples - 1).bit_length() if own_weights else num_samples

    def normalizer(self, reports: Sequence[ShardReport]) -> Callable[[list[torch.Tensor]], bool | None]:
        """Return a function that divides sums over these shards by their factor and returns whether they are finite.

        With a deferred overflow check the function returns None instead.
        """
        total = 1.0
        if self.mean and self.num_samples is not None:
            total, num_own = 0.0, 0
            # Added up in order of shards, in Python floats: every rank has the same reports and gets the same divisor.
            for report in reports:
                total += report.weight
                num_own += report.has_own_weight
            total /= self._divisor(own_weights=self.weighted or num_own > 0)
            self.is_mixed = num_own < len(reports) and self.weighted != (num_own > 0)
        factor = self.loss_scale_factor if total == 1.0 else self.loss_scale_factor * total
        return partial(divide_ if self.deferred else unscale_and_check_, factor=factor)


@dataclass(slots=True)
class DeviceGradientTask:
    """Compute and sum the gradients of the shards of one device; a `ShardTask`.

    Attributes:
        context: What the shards have in common.
        last: The last shard of the device, whose backward completes its sums; None without shards.
        observers: The replica's modules under the names that they report by.
        gradients: The partial sums, with one entry per parameter that requires a gradient.
        buffer_sum: The sum of what the shards left in the buffers.
        reports: What each shard that took part measured.
        buffer_weight: The weight of the sum of the buffers: the number of samples in these shards; 1 where a single
            shard makes up the update.
        spoiled: Whether gradients were added in another order, so that the shards have to run again.
    """

    context: GradientContext
    last: Shard | None
    observers: Observers
    gradients: ShardSum
    buffer_sum: BufferSum
    reports: list[ShardReport] = field(default_factory=list)
    buffer_weight: int = 0
    spoiled: bool = False
    phase: ClassVar[str] = FORWARD

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Compute the gradient of a shard and add it to the sums; a shard of weight 0 takes no part.

        Args:
            runner: The runner of the replica to use.
            shard: The shard.
            given: The tensors of the shard, on the runner's device.

        Raises:
            ReplicaError: If user code raised; the original error is the cause.
            TypeError: If the loss function returned something other than a loss.
            ValueError: If it returned a loss that cannot be used.
        """
        context = self.context
        # Every shard starts from the buffers of the last update. One that saw those of the shard before it on this
        # device would depend on the number of devices.
        if runner.buffers.entries:
            runner.buffers.restore()
        # Weights that `parametrize.cached` keeps have the graph of the shard before.
        parametrize._cache.clear()  # noqa: SLF001 - no public way
        args, kwargs = (given, NO_KWARGS) if type(given) is tuple else call_arguments(given)
        if context.carried is not None:
            kwargs = {**kwargs, "carried": context.carried.part(shard.samples, runner.device)}
        loss_fn = context.loss_fn if context.shard_loss is None else context.shard_loss(shard)
        context.watch.phase = FORWARD
        try:
            # Reports are collected around forward only: activation checkpointing runs the forward again during
            # backward, and would report everything twice.
            with (
                NO_CONTEXT
                if context.precision.autocast_dtype is None
                else context.precision.autocast(runner.device.type),
                collecting(self.observers, len(shard.samples)) as reported,
            ):
                returned = loss_fn(runner.replica, *args, **kwargs)
        except Exception as error:
            raise runner.error(FORWARD, shard, explained(error, loss_fn, args, kwargs)) from error
        if list(map(GRADIENT, runner.parameters)).count(None) < len(runner.parameters):
            check_no_inner_backward(runner.replica)
        loss = check_loss(returned)
        if context.is_first:
            # Weakly: what was created for this shard ends with its graph.
            context.foreign_leaves.extend(map(ref, foreign_leaves([loss.value], runner.replica)))
            if context.at_start and shard.index == 0:
                warn_of_rows(loss_fn, args, kwargs, len(shard.samples))
        if context.carried is not None:
            context.carried.keep(shard.samples, loss.carried)
        weight = loss_weight(loss, len(shard.samples), batch=shard.batch, no_means=context.no_means)
        # Only ever set, because the threads of all devices share the context.
        if isinstance(loss.weight, torch.Tensor):
            context.has_tensor_weights = True
        if weight > 0:
            # The name "loss" belongs to the loss of the update, which is recorded beside the others.
            reported.pairs.pop("loss", None)
            metrics = reported.pairs | metric_pairs(loss) if loss.metrics else reported.pairs
            report = ShardReport(shard.index, weight, loss.value.detach(), metrics, loss.weight is not None)
            self._add(runner, shard, loss, report)

    def _add(self, runner: ShardRunner, shard: Shard, loss: Loss, report: ShardReport) -> None:
        """Run backward, and add the gradients, buffers and report of a shard to the sums of the device."""
        context, send = self.context, None
        # Before its last shard the device's sums are incomplete, and nothing of them can be sent.
        if context.early_send is not None and shard is self.last:
            send = DeviceSend(context.early_send, runner.place, shard.index, self.gradients.partials)
        remaining_factor = self._backward(runner, shard, loss, report.weight, send)
        gradients = runner.pop_gradients()
        if send is None or not send.finish(gradients):
            if remaining_factor is not None or context.precision.held_dtype is not None:
                self._finish_gradients(gradients, remaining_factor)
            send = None
        # Before the push, which adds to the gradients in place.
        if context.inspect_shard is not None:
            context.inspect_shard(shard, gradients, report)
        if send is None:
            self.gradients.push(shard.index, gradients)
        # The buffers of a single shard get weight 1: in floating point, x * n / n is not always x.
        alone = context.num_samples is None
        weight = 1 if alone else len(shard.samples)
        if runner.buffers.entries:
            runner.buffers.collect(shard.index, weight, self.buffer_sum, alone=alone)
        self.buffer_weight += weight
        self.reports.append(report)

    def _backward(
        self, runner: ShardRunner, shard: Shard, loss: Loss, weight: float, send: DeviceSend | None
    ) -> float | torch.Tensor | None:
        """Run backward so that the gradient of the scaled loss is left in the replica's parameters.

        Returns:
            The factor by which the gradients have still to be multiplied; None if there is none.
        """
        context = self.context
        initial, remaining_factor = context.initial_gradient(loss, weight)
        context.watch.phase = BACKWARD
        # The returned value is ignored on purpose: a shard whose forward has run is completed even after a request to
        # stop.
        runner.replicas.progress.enter_phase(runner.place, BACKWARD, shard)
        merge, around = None, NO_CONTEXT
        # Gradients that have still to be multiplied are not yet the values to send or to add up.
        if remaining_factor is None and send is not None:
            around = send.sending(runner.parameters)
        elif remaining_factor is None and context.merges and (merge := self._merge(shard)) is not None:
            around = merge.merging(runner.parameters)
        with around:
            runner.backward(shard, (loss.value,), (initial,))
        self.spoiled |= merge is not None and merge.spoiled
        return remaining_factor

    def _merge(self, shard: Shard) -> GradientMerge | None:
        """Return what adds the gradients of a shard to the sums during backward; None if they are needed after it."""
        context = self.context
        inspected = context.inspected
        is_read = context.inspect_shard is not None and (inspected is None or shard.index in inspected)
        if is_read or context.precision.held_dtype is not None:
            return None
        return GradientMerge(self.gradients, shard.index)

    def _finish_gradients(self, gradients: Tensors, remaining_factor: float | torch.Tensor | None) -> None:
        """Convert gradients to the dtype they are summed in, and multiply them by the remaining factor."""
        # Converted first: the remaining factor would round gradients that are still in half precision.
        if self.context.precision.held_dtype is not None:
            gradients[:] = [None if gradient is None else gradient.float() for gradient in gradients]
        if remaining_factor is not None:
            multiply_(gradients, remaining_factor)


ShardFunction = Callable[[int, Any], Any]
"""Called as ``function(place, given)`` with the index of the device and the value prepared for the shard."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a function returned for one shard.

    Attributes:
        shard: The shard.
        given: The value that the function was given.
        returned: The value that it returned.
        reports: The sum and the weight of each value that was reported meanwhile (see `lockstep.report`).
    """

    shard: Shard
    given: Any
    returned: Any
    reports: Mapping[str, Any]


@dataclass(slots=True)
class DeviceForwards:
    """Run a function on the shards of one device; a `ShardTask`.

    Attributes:
        function: The function.
        precision: The precision policy.
        observers: The replica's modules under the names that they report by.
        watch: Where this process records what it is doing.
        results: The results of the shards so far.
    """

    function: ShardFunction
    precision: Precision
    observers: Observers
    watch: Watch
    results: list[ShardResult] = field(default_factory=list)
    phase: ClassVar[str] = "forward"

    def run(self, runner: ShardRunner, shard: Shard, given: Any, /) -> None:
        """Run the function on a shard.

        Args:
            runner: The runner of the replica to use.
            shard: The shard.
            given: The value for the function.

        Raises:
            ReplicaError: If the function raised; the original error is the cause.
        """
        # As in an update: a shard that saw the buffers of the one before it would depend on the number of devices.
        if runner.buffers.entries:
            runner.buffers.restore()
        self.watch.phase = "evaluation"
        try:
            with self.precision.autocast(runner.device.type), collecting(self.observers, len(shard.samples)) as reports:
                returned = self.function(runner.place, given)
        except Exception as error:
            raise runner.error("forward", shard, error) from error
        self.results.append(ShardResult(shard, given, returned, reports.pairs))
