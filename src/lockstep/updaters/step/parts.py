"""Notice a loss that is no mean over samples, by its values for a shard and for parts of the shard.

The operations that computed a loss show a part of what it may be, and its values show the rest: a mean over all samples
is the mean of the means over its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.nest import call_arguments
from lockstep.replicas import Constants, uncompiled
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.attempt.audit import Audit
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.attempt.other_place import without_caches
from lockstep.updaters.compute.shard_gradients import DeviceForwards
from lockstep.updaters.loss import check_loss, loss_weight
from lockstep.updaters.step.recomputation import Recomputation

MOST_PARTS: Final = 4
"""The number of parts that a shard is cut into, if it has enough samples."""
ROUNDED: Final = 1e-3
"""By how much values may differ because kernels round differently for other numbers of samples, relative to the largest
one."""
ROUNDED_TO_HALF: Final = 5e-2
"""The same for values that were computed in half precision, or on an accelerator, which may do so unseen."""

Values: TypeAlias = "list[tuple[float, float]]"
"""The loss and its weight for all samples of a shard, and for each part of them."""


def compare_parts(again: Recomputation, attempt: Attempt, audit: Audit, context: UpdateContext) -> None:
    """Note what shows that the loss of the audited shard is no mean over its samples, in the first audit of several.

    The loss function is called for the shard and for parts of it, with running statistics of batch normalization and
    with constants in place of random numbers. If it raises then, or returns other values when it is called again,
    nothing is known.

    Args:
        again: Computes shards again.
        attempt: The attempt, whose shards are computed, and whose context receives what is found.
        audit: The shard.
        context: The context of the update.
    """
    samples, no_means = audit.shard.samples, attempt.gradient_context.no_means
    # Not once more after an overflow: the loss function is the same.
    applies = audit.compares_buffers and attempt.number == 1 and audit.place[0] == audit.rank and len(samples) > 1
    if not applies or no_means is None or any(no_means) or audit.differs:
        return
    try:
        first, tolerance = _values(again, attempt, audit, context)
        if _is_mean(first, tolerance):
            return
        second, _ = _values(again, attempt, audit, context)
    except Exception:  # noqa: BLE001 - user code may refuse so few samples
        return
    if all(abs(one - other) <= tolerance / 10 * abs(one) for (one, _), (other, _) in zip(first, second, strict=True)):
        whole, *parts = (f"{value:.4g}" for value, _ in first)
        no_means.add(f"{whole} for {len(samples)} samples, of which parts have {', '.join(parts)},")


def _is_mean(values: Values, tolerance: float) -> bool:
    """Return whether the first value is the mean of the others by their weights, as far as it is known."""
    # A part without weight, such as one whose labels are all ignored, may have any value.
    (whole, _), *parts = counted = [(value, weight) for value, weight in values if weight]
    if not all(math.isfinite(value) for value, _ in counted):
        return True
    mean = sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)
    return abs(whole - mean) <= tolerance * max(abs(whole), *(abs(value) for value, _ in parts))


def _values(again: Recomputation, attempt: Attempt, audit: Audit, context: UpdateContext) -> tuple[Values, float]:
    """Return the loss of the audited shard and of its parts, with their weights, and by how much they may differ."""
    place, shard, gradients = audit.place[1], audit.shard, attempt.gradient_context
    runner, size = again.prepared.runners[place], len(shard.samples)
    ((_, given),) = again.tensors_of(attempt, audit, shard, place)
    # Of at least two samples where there are as many: some code takes no single one.
    number = max(2, min(MOST_PARTS, size // 2))
    cuts = [size * part // number for part in range(number + 1)]
    parts = [range(size), *map(range, cuts, cuts[1:])]
    # Cut from the tensors of the shard: a converter may draw others, or fill others up, for fewer samples.
    conversion = again.conversion.apart()
    cut = [replace(shard, batch=0, samples=part) for part in parts]
    # One after the other, so that each has tensors of its own, which the loss function may change in place.
    work = [(shard, (each.samples, conversion.shards([given], [[each]], [runner.device], 0)[0][0][1])) for each in cut]

    def loss_of(_: int, each: tuple[range, Any]) -> tuple[float, float]:
        part, tensors = each
        args, kwargs = call_arguments(tensors)
        if gradients.carried is not None:
            kwargs = {**kwargs, "carried": gradients.carried.part(shard.samples[part.start : part.stop], runner.device)}
        loss = check_loss(gradients.loss_fn(runner.replica, *args, **kwargs))
        return loss.value.item(), loss_weight(loss, len(part))

    operations = Constants()
    task = DeviceForwards(loss_of, gradients.precision, again.prepared.observers[place], gradients.watch)

    def compute(at: int) -> None:
        if at == place:
            users = [gradients.loss_fn, *runner.replica.modules()]
            with _without_batch_statistics(runner.replica), without_caches(users), uncompiled(), operations:
                runner.run(work, task, again.streams)
                runner.buffers.restore()

    again.run(compute, attempt, context)
    exact = runner.device.type == "cpu" and not operations.in_half
    return [each.returned for each in task.results], ROUNDED if exact else ROUNDED_TO_HALF


@contextmanager
def _without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Use the running statistics of batch normalization inside the ``with`` block."""
    modes = [(each, each.training) for each in model.modules() if isinstance(each, _BatchNorm)]
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
