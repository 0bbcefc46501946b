"""One attempt at computing a gradient: the request, and what each stage of an update has added so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from lockstep.data import Fingerprint
from lockstep.errors import OrderError
from lockstep.plan import Shard
from lockstep.precision import CurrentScale, first_nonfinite, nonfinite_flags
from lockstep.replicas import BufferSum
from lockstep.tree import Tensors
from lockstep.updaters.attempt.audit import Audit
from lockstep.updaters.attempt.deferred import DeferredCheck, FiniteCheck, OverflowCheck
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask, GradientContext
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.result import ShardReport, UpdateResult
from lockstep.updaters.setup.batches import DeviceShards


class Described(NamedTuple):
    """The description of a batch.

    Attributes:
        checksum: A checksum of everything else; a single number is sent fastest.
        source: The name of the iterator that the batch comes from; empty for a batch given to `compute_gradients`.
        fingerprint: The fingerprint of the batch.
    """

    checksum: int
    source: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """Which gradient to compute.

    Attributes:
        loss_fn: Returns the loss of a shard.
        wanted: The parameters that get a gradient, by ``id``; None for all that require one.
        computation: The number of gradients that the update has computed before.
        deferred: Whether the overflow check stays on the device; see `updaters.attempt.deferred`.
        inspect_shard: Called with every shard that takes part, its gradients and its report, in the thread that
            computed it. If given, the gradient is not assigned to any parameter.
        taken: Descriptions, for the other ranks, of the batches that a step function has taken from iterators.
        buffers_of: The names of the models whose buffers the step may change; None for all.
        shard_loss: Returns the loss function of a shard; None if it is `loss_fn` for all of them.
        gathers: Whether the shards only compute outputs for a `BatchLoss`.
    """

    loss_fn: LossFunction
    wanted: frozenset[int] | None = None
    computation: int = 0
    deferred: bool = False
    inspect_shard: Callable[[Shard, Tensors, ShardReport], None] | None = None
    taken: Sequence[Described] = ()
    buffers_of: Collection[str] | None = None
    shard_loss: Callable[[Shard], LossFunction] | None = None
    gathers: bool = False

    @property
    def purpose(self) -> int | str:
        """What the gradient is for, by which ranks find out that they compute the same: its number in the update."""
        if self.gathers:
            return "outputs of a BatchLoss"
        return self.computation if self.inspect_shard is None else "search for what is not finite"


FINITE: Final = FiniteCheck()


def check_finite(
    names: Iterable[str], gradients: Tensors, finite: Sequence[bool | None], *, any_shard: bool = False
) -> OverflowCheck:
    """Check whether gradients are finite, and name the first parameter whose gradient is not.

    If the check was deferred, nothing is read from the device.

    Args:
        names: The names of the parameters, in the order of the gradients.
        gradients: The gradients, None where there is none.
        finite: Whether each slice of the gradients is finite; None where the check was deferred.
        any_shard: Whether a shard was computed, whose loss must have reached a parameter.

    Raises:
        ValueError: If no parameter has a gradient although a shard was computed.

    >>> check_finite(["weight", "bias"], [None, torch.tensor([torch.inf])], [True, False]).nonfinite
    'bias'
    """
    for gradient in gradients:
        if gradient is not None:
            break
    else:
        if any_shard:
            raise ValueError(
                "`loss_fn` must compute its loss with the model that it is given, a replica of yours, got a loss that "
                "gives none of its parameters a gradient."
            )
    # The usual case needs no names; parameters are only searched where a slice is not finite.
    if False not in finite and None not in finite:
        return FINITE
    named = zip(names, gradients, strict=True)
    present = {name: gradient for name, gradient in named if gradient is not None}
    if None in finite and present:
        return DeferredCheck(list(present), nonfinite_flags(list(present.values())))
    return FiniteCheck(first_nonfinite(present))


@dataclass
class Attempt:
    """One attempt at the gradient of some batches, which changes nothing of the training state.

    The stages of an update fill in the attributes in this order.

    Attributes:
        request: Which gradient to compute.
        scale: The loss scale of this attempt.
        first_scale: The loss scale of the first attempt of the update.
        given_batches: The batches to use; empty for the iterator's next ones.
        no_retry: Whether no other attempt may follow, whatever the gradient.
        is_final: Whether no other attempt follows.
        number: The number of this attempt, 1 for the first.
        skipped_batches: The number of batches that earlier attempts of the update have given up.
        previous_nonfinite: The non-finite parameter that the last failed attempt before this one named.
        batches: *Take*: the batches of this attempt.
        sizes: *Plan*: the number of samples in each batch.
        summed: Whether the losses of shards are sums over samples instead of means.
        share: The shards that this process computes.
        device_shards: These shards by device, each with its tensors.
        audit: The shard that is computed twice; None if none is.
        may_send_early: Whether the next gradient may be sent while it is computed, because its update is not audited.
        gradient_context: What the computations of all shards have in common.
        device_tasks: *Compute*: the tasks with the sums over the shards of each device.
        gradients: *Reduce*: the gradient of each parameter that requires one; None where no shard reached it.
        slices_are_finite: Whether each slice of the gradients is finite; None where the check was deferred.
        buffer_sums: The sums of what shards have left in the buffers, one per device, or one over all ranks.
        buffer_weight: The total weight of these sums: the number of samples that took part; 1 where a single shard did.
        reports: What each shard that took part measured, in order.
        carried: The new values that are carried to the next batch; None if nothing is carried.
        complete: Whether no shard was left out, as can happen after an interrupt whose handler returns.
        overflow_check: *Check*: whether the gradient is finite.
        gradients_assigned: Whether the gradients have been stored where optimizers read them.
        replaced: The error for a gradient that was computed before this one and that no optimizer has used.
        replaces: The number of gradients in a row before this one that no optimizer of the updater has stepped by.
        stream_position: How far what draws after the shards has come in its stream; None before it has drawn.
        grad_norm: *Commit*: the norm of the gradients before they were clipped; None if they were not.
    """

    request: GradientRequest
    scale: CurrentScale
    first_scale: CurrentScale
    given_batches: Sequence[Any] = ()
    no_retry: bool = False
    number: int = 1
    skipped_batches: int = 0
    previous_nonfinite: str | None = None
    is_final: bool = field(default=False, init=False)
    # Filled in by the stages. Those with a value here are not set by the constructor, which runs in every attempt.
    batches: Sequence[Any] = field(init=False)
    sizes: Sequence[int] = field(init=False)
    summed: bool = field(init=False)
    share: RankShare = field(init=False)
    device_shards: DeviceShards = field(init=False)
    audit: Audit | None = field(default=None, init=False)
    may_send_early: bool = field(default=True, init=False)
    gradient_context: GradientContext = field(init=False)
    device_tasks: Sequence[DeviceGradientTask] = field(default=(), init=False)
    gradients: Tensors = field(init=False)
    slices_are_finite: Sequence[bool | None] = field(default=(), init=False)
    buffer_sums: Sequence[BufferSum] = field(default=(), init=False)
    buffer_weight: int = field(default=0, init=False)
    reports: Sequence[ShardReport] = field(default=(), init=False)
    carried: Sequence[torch.Tensor] | None = field(default=None, init=False)
    complete: bool = field(default=True, init=False)
    overflow_check: OverflowCheck = field(default=FINITE, init=False)
    gradients_assigned: bool = field(default=False, init=False)
    replaced: OrderError | None = field(default=None, init=False)
    replaces: int = field(default=0, init=False)
    stream_position: list[torch.Tensor] | None = field(default=None, init=False)
    grad_norm: torch.Tensor | None = field(default=None, init=False)

    @property
    def consumed_batches(self) -> int:
        """The number of batches that the iterator has to advance by."""
        return self.skipped_batches + len(self.batches)

    @property
    def nonfinite(self) -> str | None:
        """The first non-finite parameter of this attempt, or else of the last failed one before it, or None."""
        return self.overflow_check.nonfinite or self.previous_nonfinite

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether the weights move, because the gradient is finite; a tensor where only the device knows."""
        if self.overflow_check.found_inf is not None:
            return self.overflow_check.found_inf == 0
        # Without reports every shard had weight 0, and there is nothing to step by.
        return self.overflow_check.nonfinite is None and bool(self.reports)

    def result(self, *, applied: bool | torch.Tensor) -> UpdateResult:
        """Return the result for the user, who may read it at any later time.

        Args:
            applied: Whether the weights have moved; a tensor where only the device knows.
        """
        # Bound to the check alone: a reference to the attempt would keep its gradients in memory.
        check, previous = self.overflow_check, self.previous_nonfinite
        return UpdateResult(
            applied=partial(bool, applied),
            tries=self.number,
            loss_scale=partial(float, self.gradient_context.loss_scale_factor),
            nonfinite=lambda: check.nonfinite or previous,
            reports=self.reports,
            summed=self.summed,
            skipped=check.nonfinite is not None if check.found_inf is None else check.found_inf,
            grad_norm=self.grad_norm,
        )

    def next_scale(self, scale: CurrentScale) -> CurrentScale:
        """Return the loss scale that follows this attempt.

        Args:
            scale: The current loss scale of the updater. It differs from `first_scale` if another gradient was computed
                between this one and its step; then an overflow still lowers the scale, but success does not raise it.
        """
        if self.overflow_check.found_inf is not None:
            return scale.after(self.overflow_check.found_inf, given=self.first_scale)
        # An attempt whose shards all had weight 0 says nothing about the scale.
        if not self.reports or scale.fixed_factor is not None:
            return scale
        next_value, now = self.scale.value.after(finite=self.overflow_check.nonfinite is None), scale.value
        may_rise = now is self.first_scale.value
        if next_value is now or not (may_rise or next_value.factor < now.factor):
            return scale
        return CurrentScale(next_value)
