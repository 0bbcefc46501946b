"""Notice a loss that is no mean over samples, by its values and gradients for a shard and for parts of the shard.

The operations that computed a loss show a part of what it may be, and its values show the rest: a mean over all samples
is the mean of the means over its parts, and so is its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import warn
from lockstep.nest import call_arguments, map_tensors
from lockstep.plan import Shard
from lockstep.replicas import Draws, as_real, uncompiled
from lockstep.state import temporarily
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.attempt.audit import Audit
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.shard_gradients import DeviceForwards
from lockstep.updaters.loss import check_loss, loss_weight
from lockstep.updaters.result import ShardReport
from lockstep.updaters.setup.batches import Conversion, copied
from lockstep.updaters.step.recomputation import Recomputation, without_caches

MOST_PARTS: Final = 4
"""The number of parts that a shard is cut into, if it has enough samples."""
EQUAL_PARTS: Final = (2, 3, 5)
"""Other numbers of parts that are tried where they are of equal sizes."""
ROUNDED: Final = 1e-3
"""By how much values may differ because kernels round differently for other numbers of samples, relative to the largest
one."""
ROUNDED_GRADIENT: Final = 1e-2
"""The same for gradients: the terms of one, such as that of a bias in front of a convolution, may nearly cancel."""
ROUNDED_TO_HALF: Final = 5e-2
"""The same for values that were computed in half precision, or on an accelerator, which may do so unseen."""

MOST_ELEMENTS: Final = 2**16
"""The number of elements of a parameter above which its gradient is not compared."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The loss of some samples.

    Attributes:
        value: The loss.
        weight: Its weight.
        gradient: Its share in the gradient of all samples, by the smaller parameters; empty if there is none.
        reported: The values that were reported or are metrics of the loss, with their weights, by name.
    """

    value: float
    weight: float
    gradient: torch.Tensor
    reported: Mapping[str, Any]

    @classmethod
    def of_report(cls, report: ShardReport | None) -> Computed:
        """Return the loss and the values of a shard in an evaluation; None is one without weight."""
        if report is None:
            return cls(0.0, 0.0, torch.zeros(0), {})
        return with_means(cls(report.loss.item(), report.weight, torch.zeros(0), report.metrics), {})


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
    numbers = _numbers_of_parts(len(samples))

    def compute(draws: Draws) -> list[Computed]:
        while True:
            try:
                return _values(again, attempt, audit, context, draws=draws, number=numbers[0])
            except Exception:
                # A loss of pairs or views takes some numbers of samples only.
                if len(numbers) == 1:
                    raise
                del numbers[0]

    differs, reported = find_no_means(compute, again.prepared.runners[audit.place[1]].device)
    if differs:
        no_means.found.add(no_means.weighted or differs)
    for name, what in reported.items():
        warn(
            f"The reported value {name!r} is {what} and so is no mean over samples. What is logged is the mean of "
            "the values of the shards, weighted by samples, which depends on the number of shards. Report a mean, "
            "with its weight if that is no number of samples, such as the correct ones among all; compute a sum, "
            "an extreme or a metric such as F1 in an Evaluator, or after the update.",
        )


def find_no_means(compute: Callable[[Draws], Sequence[Computed]], device: torch.device) -> tuple[str, dict[str, str]]:
    """Return what a loss is, and what reported values are by name, that are no means of those of parts of the samples.

    The loss is described by an empty text if it is a mean, or if nothing is known.

    Args:
        compute: Returns the losses of some samples and of their parts, which draw the same numbers. It is called again
            if something differs, because what differs then, such as a time, says nothing; and once more with the other
            numbers that a part may have, where several rows are drawn for each sample.
        device: The device that computes them.
    """
    draws = Draws()
    try:
        first = compute(draws)
        tolerance = ROUNDED if device.type == "cpu" and not draws.in_half else ROUNDED_TO_HALF
        differs, reported = _difference(first, tolerance), _differences_of_reports(first, tolerance)
        if not differs and not reported:
            return "", {}
        second, third = compute(Draws()), compute(Draws(interleaved=True))
    except (Exception, SystemExit):  # noqa: BLE001 - user code may refuse so few samples, or end at a loss of NaN
        return "", {}
    pairs = [*zip(first, second, strict=True)]

    def is_repeated(name: str) -> bool:
        return all(str(one.reported[name][0]) == str(other.reported.get(name, (math.nan,))[0]) for one, other in pairs)

    alike = all(_is_equal(one, other, tolerance / 10) for one, other in pairs) and _difference(third, tolerance)
    names = _differences_of_reports(third, tolerance).keys()
    return differs if alike else "", {name: reported[name] for name in reported if name in names and is_repeated(name)}


def _numbers_of_parts(size: int) -> list[int]:
    """Return the numbers of parts to try for so many samples, the usual one first, and then those of equal parts."""
    # Of at least two samples where there are as many: some code takes no single one.
    usual = max(2, min(MOST_PARTS, size // 2))
    return [usual, *(each for each in EQUAL_PARTS if each != usual and size % each == 0)]


def parts_of(
    shard: Shard, given: Any, conversion: Conversion, device: torch.device, number: int | None = None
) -> list[tuple[Shard, Any]]:
    """Return a shard and parts of it, each with its samples, counted from 0, and tensors of its own.

    Args:
        shard: The shard, of at least two samples.
        given: Its tensors. Parts are cut from them: a converter may draw others, or fill others up, for fewer samples.
        conversion: Cuts the tensors.
        device: The device to compute on.
        number: The number of parts; by default two to four.
    """
    size = len(shard.samples)
    number = _numbers_of_parts(size)[0] if number is None else number
    cuts = [size * part // number for part in range(number + 1)]
    conversion = conversion.apart()
    cut = [replace(shard, batch=0, samples=part) for part in (range(size), *map(range, cuts, cuts[1:]))]
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


def with_means(computed: Computed, reports: Mapping[str, Any]) -> Computed:
    """Return what was computed with the means of the metrics of the loss and of what was reported.

    Args:
        computed: The loss, with the sums and weights of its metrics.
        reports: The sums and weights of what was reported.
    """
    pairs = {name: (float(sum_), float(weight)) for name, (sum_, weight) in {**computed.reported, **reports}.items()}
    return replace(
        computed, reported={name: (sum_ / (weight or 1.0), weight) for name, (sum_, weight) in pairs.items()}
    )


def _difference(computed: Sequence[Computed], tolerance: float) -> str:
    """Return why the first of several losses is not the mean of the others; empty if it is, or if that is not known."""
    # A part without weight, such as one whose labels are all ignored, may have any value.
    whole, *parts = [each for each in computed if each.weight]
    found = _apart([(each.value, each.weight) for each in (whole, *parts)], tolerance)
    known = all(len(each.gradient) == len(whole.gradient) for each in parts) and bool(whole.gradient.isfinite().all())
    if found or not known:
        return found
    apart = whole.gradient - sum(each.gradient for each in parts)
    most = max(tolerance, ROUNDED_GRADIENT) * float(sum(each.gradient.norm() for each in (whole, *parts)))
    rounded = float(apart.norm()) <= most
    return "" if rounded else "a value whose gradient for some samples is not the mean of the gradients of their parts,"


def _differences_of_reports(computed: Sequence[Computed], tolerance: float) -> dict[str, str]:
    """Return the reported values that are no means, with what they are, by name."""
    names = [name for name in computed[0].reported if all(name in each.reported for each in computed)]
    found = {name: _apart([each.reported[name] for each in computed], tolerance) for name in names}
    return {name: what for name, what in found.items() if what}


def _apart(values: Sequence[tuple[float, float]], tolerance: float) -> str:
    """Return what values are of which the first is not the mean of the others by their weights; empty if it is."""
    (whole, _), *parts = counted = [(value, weight) for value, weight in values if weight]
    mean = sum(value * weight for value, weight in parts) / (sum(weight for _, weight in parts) or 1.0)
    if not math.isfinite(whole) or abs(whole - mean) <= tolerance * max(abs(value) for value, _ in counted):
        return ""
    return f"{whole:.4g} for some samples, of which parts have {', '.join(f'{value:.4g}' for value, _ in parts)},"


def _is_equal(one: Computed, other: Computed, tolerance: float) -> bool:
    """Return whether two computations of the same samples have the same result, which may be infinite or NaN."""
    values, others = (torch.cat([torch.tensor([each.value]), each.gradient]) for each in (one, other))
    if len(values) != len(others) or not torch.equal(values.isfinite(), others.isfinite()):
        return False
    finite = values.isfinite()
    return bool((values - others)[finite].norm() <= tolerance * values[finite].norm())


def _values(
    again: Recomputation, attempt: Attempt, audit: Audit, context: UpdateContext, *, draws: Draws, number: int
) -> list[Computed]:
    """Return the losses of the audited shard and of a number of parts of it."""
    place, shard, gradients = audit.place[1], audit.shard, attempt.gradient_context
    runner = again.prepared.runners[place]
    ((_, given),) = again.tensors_of(attempt, audit, shard, place)
    work = parts_of(shard, given, again.conversion, runner.device, number)
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
        gradient = _gradient(loss.value, share, runner.parameters)
        draws.end()
        return Computed(loss.value.item(), weight, gradient, loss.metrics)

    task = DeviceForwards(loss_of, gradients.precision, again.prepared.observers[place], gradients.watch)

    def compute(at: int) -> None:
        if at == place:
            users = [gradients.loss_fn, *runner.replica.modules()]
            with _without_batch_statistics(runner.replica), without_caches(users), uncompiled(), draws:
                runner.run(work, task, again.streams)
                runner.buffers.restore()

    again.run(compute, attempt, context)
    return [with_means(each.returned, each.reports) for each in task.results]


def _gradient(value: torch.Tensor, share: float, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return a share of a gradient as one vector, with the scale that it has in the gradient of all samples."""
    smaller = [each for each in parameters if each.numel() <= MOST_ELEMENTS] or [*parameters]
    outer = torch.full_like(value, share)
    try:
        # What backward draws comes from the stream of the shard, which the threads of accelerators do not have.
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(value, smaller, outer, allow_unused=True, materialize_grads=True)
    except RuntimeError:  # there is no graph, or one whose checkpoints compute all gradients or none
        return torch.zeros(0)
    return torch.cat([as_real(each.to_dense()).flatten().cpu() for each in found]).double()


@contextmanager
def _without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Use the running statistics of batch normalization inside the ``with`` block."""
    with ExitStack() as stack:
        for each in model.modules():
            if isinstance(each, _BatchNorm):
                if each.running_mean is None:
                    raise ValueError("Without running statistics a shard is normalized by its own.")
                stack.enter_context(temporarily(each, training=False))
                # The loss function may call `train` on the model.
                vars(each)["train"] = lambda mode=True, each=each: each  # noqa: ARG005 - as `Module.train` is called
                stack.callback(vars(each).pop, "train")
        yield
