"""One attempt at computing a gradient: the request, and what each stage of an update has added so far.

The overflow check of an update may stay on the device, where the host does not need its result. With
``on_overflow="skip"`` there is one attempt, whatever its gradient. Optimizers that accept a flag skip their step by it,
buffers keep their values by it, and the loss scale and the number of applied updates follow it, all on the device.
`Deferral.reasons` yields why an update reads something on the host all the same. The result is the same, bit for bit,
as that of a run that reads the check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lockstep.data import Fingerprint
from lockstep.errors import OrderError
from lockstep.plan import Shard
from lockstep.precision import CurrentScale, LossScale, cannot_skip, first_flagged, first_nonfinite, nonfinite_flags
from lockstep.replicas import BufferSum, unpackable_buffer
from lockstep.tree import Tensors
from lockstep.updaters.attempt.audit import Audit
from lockstep.updaters.compute.shard_gradients import DeviceGradientTask, GradientContext
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.result import ShardReport, UpdateResult
from lockstep.updaters.setup.batches import DeviceShards
from lockstep.updaters.setup.names import Names
from lockstep.updaters.setup.recipe import OnOverflow
from lockstep.updaters.state.training import TrainingState

LOG = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """Whether a gradient is finite, known on the host.

    Attributes:
        nonfinite: The name of the first parameter whose gradient is not finite; None if all are.
        found_inf: Always None, because there is nothing for the device to decide.
    """

    nonfinite: str | None = None
    found_inf: None = None


class DeferredCheck:
    """Whether a gradient is finite, known on the device until it is read.

    Args:
        names: The names of the parameters that have a gradient.
        flags: One float32 per name: 1 where the gradient is not finite, else 0.

    >>> check = DeferredCheck(["weight", "bias"], torch.tensor([0.0, 1.0]))
    >>> check.found_inf, check.nonfinite
    (tensor(1.), 'bias')
    """

    def __init__(self, names: Sequence[str], flags: torch.Tensor) -> None:
        self.names = names
        self.flags = flags
        self.found_inf = flags.amax()
        """A 0-d tensor on the device, above 0 if the gradient is not finite."""

    @cached_property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite, or None; waits for the device."""
        return first_flagged(self.names, self.flags)


OverflowCheck: TypeAlias = FiniteCheck | DeferredCheck


@dataclass(slots=True)
class Deferral:
    """Decides whether the overflow check of an update is deferred.

    Attributes:
        on_overflow: What follows a non-finite gradient.
        num_processes: The number of processes of the run.
        training: The training state.
        has_tensor_weights: Whether weights of the last losses were tensors, for which the host had to wait.
        has_logged: Whether the log already explains why every update reads its check.
    """

    on_overflow: OnOverflow
    num_processes: int
    training: TrainingState
    has_tensor_weights: bool = False
    has_logged: bool = False

    def reasons_to_check(self, names: Names) -> Iterator[str]:
        """Yield the reasons for which an update reads the overflow check on the host.

        Args:
            names: The optimizers that step.
        """
        if self.on_overflow != "skip":
            yield f"on_overflow={self.on_overflow!r} decides on the host whether there is another attempt"
        if self.num_processes > 1:
            yield "the processes report every attempt to each other"
        optimizers = [self.training.optimizers[name] for name in names]
        for name, optimizer in zip(names, optimizers, strict=True):
            reason = cannot_skip(optimizer, self.training.masters.get(name))
            if reason:
                yield reason
        if any(each.optimizer in optimizers for each in self.training.schedulers.values()):
            yield "a scheduler counts applied updates on the host"

    def reasons(self, names: Names) -> Iterator[str]:
        """Yield the reasons for which an update reads anything on the host; the user is told the first.

        Args:
            names: The optimizers that step.
        """
        yield from self.reasons_to_check(names)
        policy = self.training.scale.scale_class
        if policy.after_on_device is LossScale.after_on_device:
            yield f"{policy.__name__} does not override after_on_device"
        if self.has_tensor_weights:
            yield "whether a shard takes part depends on a weight that is a tensor"
        buffer = unpackable_buffer(self.training.replicas.model)
        if buffer:
            yield f"the buffer {buffer!r} is not a plain dense tensor"

    def defers(self, names: Names) -> bool:
        """Return whether the overflow check stays on the device; if it does not, log the reason once.

        Args:
            names: The optimizers that step.
        """
        reason = next(self.reasons_to_check(names), None)
        if reason is not None and not self.has_logged:
            self.has_logged = True
            LOG.info("Every update reads whether its gradient is finite: %s.", reason)
        return reason is None

    def read_if_needed(self, check: OverflowCheck, names: Names) -> OverflowCheck:
        """Read a deferred check if these optimizers need it by now, for example because of a new hook.

        Args:
            check: The check of the gradient.
            names: The optimizers that step.
        """
        return check if next(self.reasons_to_check(names), None) is None else FiniteCheck(check.nonfinite)


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
        deferred: Whether the overflow check stays on the device; see `Deferral`.
        inspect_shard: Called with every shard that takes part, its gradients and its report, in the thread that
            computed it. If given, the gradient is not assigned to any parameter.
        taken: Descriptions, for the other ranks, of the batches that a step function has taken from iterators.
        buffers_of: The names of the models whose buffers may change; None for all.
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
            of_batch=self.request.shard_loss is not None,
            skipped=check.nonfinite is not None if check.found_inf is None else check.found_inf,
            grad_norm=self.grad_norm,
            num_samples=sum(self.sizes),
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
