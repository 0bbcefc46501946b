"""Notice a loss that is no mean over samples, by its values and gradients for a shard and for parts of the shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.errors import warn
from lockstep.nest import call_arguments, map_tensors
from lockstep.plan import Shard
from lockstep.replicas import (
    Computed,
    Draws,
    find_no_means,
    gradient_share,
    samples_of,
    uncompiled,
    with_means,
    without_batch_statistics,
)
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.attempt.audit import Audit
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.shard_gradients import DeviceForwards
from lockstep.updaters.loss import check_loss, loss_weight
from lockstep.updaters.setup.batches import Conversion, copied
from lockstep.updaters.step.recomputation import Recomputation, without_caches


def compare_parts(again: Recomputation, attempt: Attempt, audit: Audit, context: UpdateContext) -> None:
    """Note what shows that the loss of the audited shard is no mean over its samples, in the first audit of several.

    The loss function is called for the shard and for parts of it, with running statistics of batch normalization and
    with the random numbers of the same samples. If it raises then, other parts are tried. If it raises for all, or
    returns other values when it is called again, nothing is known.

    Args:
        again: Computes shards again.
        attempt: The attempt, whose shards are computed, and whose context receives what is found.
        audit: The shard.
        context: The context of the update.
    """
    samples, no_means = audit.shard.samples, attempt.gradient_context.no_means
    # Not once more after an overflow: the loss function is the same.
    applies = audit.compares_buffers and attempt.number == 1 and audit.place[0] == audit.rank and len(samples) > 1
    if not applies or no_means is None or no_means.found or audit.differs:
        return

    def compute(draws: Draws, number: int) -> list[Computed]:
        return _values(again, attempt, audit, context, draws=draws, number=number)

    device = again.prepared.runners[audit.place[1]].device
    differs, reported = find_no_means(compute, len(samples), device)
    if differs:
        no_means.found.add(no_means.weighted or differs)
    for name, what in reported.items():
        warn(
            f"The reported value {name!r} is {what} and so is no mean over samples. What is logged is the mean of "
            "the values of the shards, weighted by samples, which depends on the number of shards. Report a mean, "
            "with its weight if that is no number of samples, such as the correct ones among all; compute a sum, "
            "an extreme or a metric such as F1 in an Evaluator, or after the update."
        )


def parts_of(
    shard: Shard, given: Any, parts: Sequence[range], conversion: Conversion, device: torch.device
) -> list[tuple[Shard, Any]]:
    """Return parts of a shard, each with its samples and tensors of its own.

    Args:
        shard: The shard, of at least two samples.
        given: Its tensors. Parts are cut from them: a converter may draw others, or fill others up, for fewer samples.
        parts: The samples of each part, counted from the first one of the shard.
        conversion: Cuts the tensors.
        device: The device to compute on.
    """
    size, conversion = len(shard.samples), conversion.apart()
    cut = [replace(shard, batch=0, samples=part) for part in parts]
    try:
        # One after the other, so that each has tensors of its own, which the loss function may change in place.
        return [(each, (each.samples, conversion.shards([given], [[each]], [device], 0)[0][0][1])) for each in cut]
    except ValueError:
        # A converter may return lists with one entry per sample, such as the boxes of images.
        return [(each, (each.samples, map_tensors(copied, _entries(given, each.samples, size)))) for each in cut]


def _entries(given: Any, samples: range, size: int, *, is_outermost: bool = True) -> Any:
    """Return the rows of tensors, and the entries of lists and tuples, that belong to some of the samples."""
    is_nest = isinstance(given, list | tuple | dict)
    if (not is_nest or not is_outermost) and isinstance(given, torch.Tensor | list | tuple) and len(given) == size:
        return given[samples.start : samples.stop]
    if not is_nest:
        raise ValueError(f"A part of a batch must have an entry for each of its {size} samples.")
    if isinstance(given, dict):
        return {key: _entries(each, samples, size, is_outermost=False) for key, each in given.items()}
    return type(given)(_entries(each, samples, size, is_outermost=False) for each in given)


def _values(
    again: Recomputation, attempt: Attempt, audit: Audit, context: UpdateContext, *, draws: Draws, number: int
) -> list[Computed]:
    """Return the losses of the audited shard and of a number of parts of it."""
    place, gradients, first = audit.place[1], attempt.gradient_context, audit.shard
    samples, parts = samples_of(first.samples, number, attempt.sizes[first.batch])
    # What cannot be read again is there for the shard only.
    shard = replace(first, index=first.index if samples == first.samples else -1, samples=samples)
    runner = again.prepared.runners[place]
    ((_, given),) = again.tensors_of(attempt, audit, shard, place)
    work = parts_of(shard, given, parts, again.conversion, runner.device)
    of_all: list[float] = []

    def loss_of(_: int, each: tuple[range, Any]) -> Computed:
        part, tensors = each
        draws.start(part)
        args, kwargs = call_arguments(tensors)
        if gradients.carried is not None:
            kwargs = {**kwargs, "carried": gradients.carried.part(shard.samples[part.start : part.stop], runner.device)}
        loss = check_loss(gradients.loss_fn(runner.replica, *args, **kwargs))
        of_all.append(weight := loss_weight(loss, len(part)))
        share = weight / of_all[0] if of_all[0] else 0.0
        gradient = gradient_share(loss.value, share, runner.parameters)
        draws.end()
        return Computed(loss.value.item(), weight, gradient, loss.metrics)

    task = DeviceForwards(loss_of, gradients.precision, again.prepared.observers[place], gradients.watch)

    def compute(at: int) -> None:
        if at == place:
            users = [gradients.loss_fn, *runner.replica.modules()]
            with without_batch_statistics(runner.replica), without_caches(users), uncompiled(), draws:
                runner.run(work, task, again.streams)
                runner.buffers.restore()

    again.run(compute, attempt, context)
    return [with_means(each.returned, each.reports) for each in task.results]
