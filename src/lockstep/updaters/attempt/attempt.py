"""One attempt at a gradient: what was asked for, and what each stage of an update has made of it so far."""

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
        ordinal: How many gradients the update has computed before.
        deferred: Whether the overflow check stays on the device; see `updaters.deferred`.
        look: Called with every shard that takes part, its gradients and its report, by the thread that
            computed it. Then the gradient is only looked at, and no parameter receives it.
        drawn: What other ranks are told of the batches that a step function has taken from iterators.
    """

    loss_fn: LossFunction
    wanted: frozenset[int] | None = None
    ordinal: int = 0
    deferred: bool = False
    look: Callable[[Shard, Tensors, ShardReport], None] | None = None
    drawn: Sequence[list[str]] = ()


FINITE: Final = FiniteCheck()


def check_finite(names: Iterable[str], gradients: Tensors, finite: Sequence[bool | None]) -> Check:
    """Name the parameter whose gradient is not finite, if there is one; where nobody looked, read nothing.

    Args:
        names: The names of the parameters, in the order of the gradients.
        gradients: None where there is none.
        finite: Whether each slice of the gradients is finite; None where nobody looked.

    >>> check_finite(["weight", "bias"], [None, torch.tensor([torch.inf])], [True, False]).nonfinite
    'bias'
    """
    if False not in finite and None not in finite:
        return FINITE
    named = zip(names, gradients, strict=True)
    present = {name: gradient for name, gradient in named if gradient is not None}
    if None in finite and present:
        return DeferredCheck(list(present), nonfinite_flags(list(present.values())))
    return FiniteCheck(first_nonfinite(present))


@dataclass(slots=True)
class Attempt:
    """One attempt at the gradient of some batches; nothing of the training state changes by it.

    The stages of an update fill it in, in this order.

    Attributes:
        request: Which gradient.
        scale: The loss scale it is made with.
        first_scale: The loss scale of the first attempt.
        given_batches: What the gradient is of, if not of the iterator's next batches.
        once: Whether no other attempt follows, whatever comes of this one.
        is_final: Whether no other attempt follows.
        tries: How many attempts there were, with this one.
        passed: How many batches earlier attempts of the update have given up.
        nonfinite_before: The first non-finite parameter of the last bad attempt before this one.
        batches: *Take*: what the gradient is of.
        sizes: *Plan*: how many samples each batch holds.
        share: The shards that this process computes.
        work: These shards by device, each with its arrays.
        task: What every shard is computed by.
        devices: *Compute*: what the shards of each device add up to.
        gradients: *Reduce*: the gradient for each parameter that requires one; None where no shard reached
            it.
        finite: For each slice of the gradients whether it is finite; None where nobody looked.
        buffers: What the shards made of the buffers, one entry for each part that is to be combined.
        samples: How many samples took part; 1 where a single shard did.
        reports: What each shard that took part measured, in order.
        complete: Whether no shard was left out. One is after an interrupt whose handler lets the work go on.
        check: *Check*: whether the gradient is finite.
        handed_over: Whether the gradient lies where optimizers look for it.
    """

    request: GradientRequest
    scale: MovingScale
    first_scale: MovingScale
    given_batches: Sequence[Any] = ()
    once: bool = False
    is_final: bool = False
    tries: int = 1
    passed: int = 0
    nonfinite_before: str | None = None
    batches: Sequence[Any] = ()
    sizes: Sequence[int] = ()
    share: RankShare = field(init=False)
    work: Sequence[Sequence[tuple[Shard, Any]]] = ()
    task: GradientTask = field(init=False)
    devices: Sequence[DeviceGradients] = ()
    gradients: Tensors = field(default_factory=list)
    finite: Sequence[bool | None] = ()
    buffers: Sequence[AnyBufferSum] = ()
    samples: int = 0
    reports: Sequence[ShardReport] = ()
    complete: bool = True
    check: Check = FINITE
    handed_over: bool = False

    @property
    def taken(self) -> int:
        """How many batches the iterator is to move past."""
        return self.passed + len(self.batches)

    @property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite here or in the last bad attempt before; else None."""
        return self.check.nonfinite or self.nonfinite_before

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether weights move by it, for its gradient is finite; a tensor where only the device knows."""
        if self.check.flag is not None:
            return self.check.flag == 0
        return self.check.nonfinite is None and bool(self.reports)

    def result(self, *, applied: bool | torch.Tensor) -> UpdateResult:
        """Return what the user is told, who may look at it whenever; it keeps no gradient alive."""
        check, before = self.check, self.nonfinite_before
        return UpdateResult(
            applied=partial(bool, applied),
            tries=self.tries,
            loss_scale=partial(float, self.task.loss_scale),
            nonfinite=lambda: check.nonfinite or before,
            reports=self.reports,
        )

    def following(self, scale: MovingScale) -> MovingScale:
        """Return the loss scale that follows.

        Args:
            scale: The updater's; another than `first_scale` where a second gradient was computed between this
                one and its step. Then an overflow still lowers it, and success does not raise it.
        """
        if self.check.flag is not None:
            return scale.after(self.check.flag, given=self.first_scale)
        if not self.reports or scale.fixed_factor is not None:
            return scale
        following, now = self.scale.value.after(finite=self.check.nonfinite is None), scale.value
        may_rise = now is self.first_scale.value
        if following is now or not (may_rise or following.factor < now.factor):
            return scale
        return MovingScale(following)
