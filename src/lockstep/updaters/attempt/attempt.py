"""One attempt at computing a gradient: the request, and what each stage of an update has added so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from lockstep.plan import Shard
from lockstep.precision import MovingScale, first_nonfinite, nonfinite_flags
from lockstep.replicas import AnyBufferSum
from lockstep.tree import Tensors
from lockstep.updaters.attempt.deferred import Check, DeferredCheck, FiniteCheck
from lockstep.updaters.compute import DeviceGradients, GradientTask, RankShare
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.result import ShardReport, UpdateResult


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """Which gradient to compute.

    Attributes:
        loss_fn: Returns the loss of a shard.
        wanted: The parameters that get a gradient, by ``id``; None for all that require one.
        ordinal: The number of gradients that the update has computed before.
        deferred: Whether the overflow check stays on the device; see `updaters.attempt.deferred`.
        inspect_shard: Called with every shard that takes part, its gradients and its report, in the thread that
            computed it. If given, the gradient is not assigned to any parameter.
        taken: Descriptions, for the other ranks, of the batches that a step function has taken from iterators.
        summed: Whether `loss_fn` returns sums over samples instead of means.
    """

    loss_fn: LossFunction
    wanted: frozenset[int] | None = None
    ordinal: int = 0
    deferred: bool = False
    inspect_shard: Callable[[Shard, Tensors, ShardReport], None] | None = None
    taken: Sequence[list[str]] = ()
    summed: bool = False


FINITE: Final = FiniteCheck()


def check_finite(names: Iterable[str], gradients: Tensors, finite: Sequence[bool | None]) -> Check:
    """Check whether gradients are finite, and name the first parameter whose gradient is not.

    If the check was deferred, nothing is read from the device.

    Args:
        names: The names of the parameters, in the order of the gradients.
        gradients: The gradients, None where there is none.
        finite: Whether each slice of the gradients is finite; None where the check was deferred.

    >>> check_finite(["weight", "bias"], [None, torch.tensor([torch.inf])], [True, False]).nonfinite
    'bias'
    """
    # The usual case needs no names; parameters are only searched where a slice is not finite.
    if False not in finite and None not in finite:
        return FINITE
    named = zip(names, gradients, strict=True)
    present = {name: gradient for name, gradient in named if gradient is not None}
    if None in finite and present:
        return DeferredCheck(list(present), nonfinite_flags(list(present.values())))
    return FiniteCheck(first_nonfinite(present))


@dataclass(slots=True)
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
        share: The shards that this process computes.
        device_shards: These shards by device, each with its arrays.
        task: What the computations of all shards have in common.
        device_gradients: *Compute*: the sums over the shards of each device.
        gradients: *Reduce*: the gradient of each parameter that requires one; None where no shard reached it.
        finite_slices: Whether each slice of the gradients is finite; None where the check was deferred.
        buffers: The buffers that shards have left, one entry per part that is to be combined.
        samples: The number of samples that took part; 1 where a single shard did.
        reports: What each shard that took part measured, in order.
        complete: Whether no shard was left out, as can happen after an interrupt whose handler returns.
        check: *Check*: whether the gradient is finite.
        gradients_assigned: Whether the gradients have been stored where optimizers read them.
    """

    request: GradientRequest
    scale: MovingScale
    first_scale: MovingScale
    given_batches: Sequence[Any] = ()
    no_retry: bool = False
    is_final: bool = False
    number: int = 1
    skipped_batches: int = 0
    previous_nonfinite: str | None = None
    batches: Sequence[Any] = ()
    sizes: Sequence[int] = ()
    share: RankShare = field(init=False)
    device_shards: Sequence[Sequence[tuple[Shard, Any]]] = ()
    task: GradientTask = field(init=False)
    device_gradients: Sequence[DeviceGradients] = ()
    gradients: Tensors = field(default_factory=list)
    finite_slices: Sequence[bool | None] = ()
    buffers: Sequence[AnyBufferSum] = ()
    samples: int = 0
    reports: Sequence[ShardReport] = ()
    complete: bool = True
    check: Check = FINITE
    gradients_assigned: bool = False

    @property
    def consumed_batches(self) -> int:
        """The number of batches that the iterator has to advance by."""
        return self.skipped_batches + len(self.batches)

    @property
    def nonfinite(self) -> str | None:
        """The first non-finite parameter of this attempt, or else of the last failed one before it, or None."""
        return self.check.nonfinite or self.previous_nonfinite

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether the weights move, because the gradient is finite; a tensor where only the device knows."""
        if self.check.flag is not None:
            return self.check.flag == 0
        # Without reports every shard had weight 0, and there is nothing to step by.
        return self.check.nonfinite is None and bool(self.reports)

    def result(self, *, applied: bool | torch.Tensor) -> UpdateResult:
        """Return the result for the user, who may read it at any later time.

        Args:
            applied: Whether the weights have moved; a tensor where only the device knows.
        """
        # Bound to the check alone: a reference to the attempt would keep its gradients in memory.
        check, previous = self.check, self.previous_nonfinite
        return UpdateResult(
            applied=partial(bool, applied),
            tries=self.number,
            loss_scale=partial(float, self.task.loss_scale),
            nonfinite=lambda: check.nonfinite or previous,
            reports=self.reports,
            summed=self.request.summed,
        )

    def next_scale(self, scale: MovingScale) -> MovingScale:
        """Return the loss scale that follows this attempt.

        Args:
            scale: The current loss scale of the updater. It differs from `first_scale` if another gradient was computed
                between this one and its step; then an overflow still lowers the scale, but success does not raise it.
        """
        if self.check.flag is not None:
            return scale.after(self.check.flag, given=self.first_scale)
        # An attempt whose shards all had weight 0 says nothing about the scale.
        if not self.reports or scale.fixed_factor is not None:
            return scale
        next_value, now = self.scale.value.after(finite=self.check.nonfinite is None), scale.value
        may_rise = now is self.first_scale.value
        if next_value is now or not (may_rise or next_value.factor < now.factor):
            return scale
        return MovingScale(next_value)
