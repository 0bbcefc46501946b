"""Notice a loss that is no mean over its samples, by parts of the samples, or by the weights of labels.

The mean over a batch is combined of the means over its shards. Of a loss that is something else, such as a sum, the
gradient then depends on the number of shards. A mean over all samples is the mean of the means over its parts, and so
is its gradient. Means over labels are right until these have another weight in one shard than in others, which the
operations that computed the loss show in any update.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.replicas.buffers.buffer_sums import as_real
from lockstep.replicas.pool.probes import OTHER_DRAWS, Draws
from lockstep.state import temporarily

REDUCED_BY_MEAN: Final = 1
"""The number by which PyTorch knows ``reduction="mean"``."""
WEIGHTED: Final = "a mean weighted by classes, or by the labels that are not ignored, over them,"
SEVERAL: Final = frozenset({"StackBackward", "CatBackward"})
"""The nodes of several losses in one tensor."""
COMBINED: Final = SEVERAL | {
    f"{name}Backward" for name in ("Add", "Sub", "Mul", "Div", "View", "Squeeze", "Unsqueeze", "ToCopy", "Neg", "Clone")
}
"""The nodes of losses that are combined of terms."""


@dataclass(eq=False, slots=True)
class NoMeans:
    """Collects what the losses of shards are that are no means over their samples.

    Attributes:
        found: What they are, for messages.
        weighted: The same for means over weighted labels, which are right where all shards have the same weight.
        weights: The weights per label of means over labels, each after its batch and the position of the term.
    """

    found: set[str] = field(default_factory=set)
    weighted: str = ""
    weights: set[tuple[int, int, str]] = field(default_factory=set)

    def note(self, value: torch.Tensor, batch: int) -> None:
        """Note whether the loss of a shard, or a term of it, is a mean over labels that have another weight elsewhere.

        Args:
            value: The loss, before backward.
            batch: The number of the batch of its samples.
        """
        # On an accelerator the host would wait.
        terms = _terms(value.grad_fn) if value.is_cpu else []
        for at, term in enumerate(terms):
            if getattr(term, "_saved_reduction", None) != REDUCED_BY_MEAN or not _name(term).startswith("NllLoss"):
                continue
            total, labels = float(term._saved_total_weight), term._saved_target.numel()  # noqa: SLF001 - no public names
            self.weights.add((batch, at, f"{total / (labels or 1):.5g}"))
            what = f"{'a term that is ' if len(terms) > 1 else ''}{WEIGHTED}"
            if total != labels:
                self.weighted = what
            # Copied, because the threads of other devices add theirs.
            if len(seen := self.weights.copy()) > len({each[:2] for each in seen}):
                self.found.add(what)


def _name(node: Any) -> str:
    """Return the name of a node without its number."""
    return "" if node is None else str(node.name()).rstrip("0123456789")


def _terms(node: Any) -> list[Any]:
    """Return the nodes of the terms that a loss is combined of.

    Args:
        node: The node of the loss.
    """
    # Sums of sums are looked at once, or a sum that is doubled n times would take 2**n steps.
    left, terms, seen = [node], list[Any](), set[Any]()
    while left:
        if (each := left.pop()) is None:
            continue
        parts = [part for part, _ in each.next_functions]
        is_of_several = _name(each) in {"SumBackward", "MeanBackward"} and _name(parts[0]) in SEVERAL
        if _name(each) in COMBINED or is_of_several:
            left += [] if each in seen else parts
            seen.add(each)
        else:
            terms.append(each)
    return terms


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

JOINED: Final = 0
"""Stands for the shard and its neighbor as parts of both together, where every number of parts is refused."""

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


def find_no_means(
    compute: Callable[[Draws, int], Sequence[Computed]], size: int, device: torch.device
) -> tuple[str, dict[str, str]]:
    """Return what a loss is, and what reported values are by name, that are no means of those of parts of the samples.

    The loss is described by an empty text if it is a mean, or if nothing is known.

    Args:
        compute: Returns the losses of some samples and of a number of parts of them, which draw the same numbers. If it
            raises, other numbers of parts are tried, and at last `JOINED`. It is called again if something differs,
            because what differs then, such as a time, says nothing; and once more with the other numbers that a part
            may have, where several rows are drawn for each sample.
        size: The number of samples.
        device: The device that computes them.
    """
    draws, numbers = Draws(), numbers_of_parts(size)
    try:
        first = _first(compute, draws, numbers)
        tolerance = ROUNDED if device.type == "cpu" and not draws.in_half else ROUNDED_TO_HALF
        differs, reported = _difference(first, tolerance), _differences_of_reports(first, tolerance)
        if not differs and not reported:
            return "", {}
        others = Draws(keeps=draws.keeps), Draws(keeps=draws.keeps, interleaved=True)
        second, third = (_first(compute, each, numbers) for each in others)
    except (Exception, SystemExit):  # noqa: BLE001 - user code may refuse so few samples, or end at a loss of NaN
        return "", {}
    pairs = [*zip(first, second, strict=True)]

    def is_repeated(name: str) -> bool:
        return all(str(one.reported[name][0]) == str(other.reported.get(name, (math.nan,))[0]) for one, other in pairs)

    alike = all(_is_equal(one, other, tolerance / 10) for one, other in pairs) and _difference(third, tolerance)
    names = _differences_of_reports(third, tolerance).keys()
    return differs if alike else "", {name: reported[name] for name in reported if name in names and is_repeated(name)}


def _first(compute: Callable[[Draws, int], Sequence[Computed]], draws: Draws, numbers: list[int]) -> Sequence[Computed]:
    """Return what the first number of parts gives that is accepted; those that are not are removed."""
    while True:
        try:
            # What code says of so few samples, such as that they have no deviation, is no news.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return compute(draws, numbers[0])
        except Exception as error:
            if OTHER_DRAWS in str(error) and not draws.keeps:
                draws.keeps = True
            elif len(numbers) > 1:
                # A loss of pairs or views takes some numbers of samples only.
                del numbers[0]
            else:
                raise
            draws.forget()


def numbers_of_parts(size: int) -> list[int]:
    """Return the numbers of parts to try for so many samples, the usual one first, and then those of equal parts."""
    # Of at least two samples where there are as many: some code takes no single one.
    usual = max(2, min(MOST_PARTS, size // 2))
    return [usual, *(each for each in EQUAL_PARTS if each != usual and size % each == 0), JOINED]


def samples_of(samples: range, number: int, batch_size: int) -> tuple[range, list[range]]:
    """Return the samples to compare; and all of them and a number of parts, counted from the first one.

    Args:
        samples: The samples of a shard.
        number: The number of parts, or `JOINED`.
        batch_size: The number of samples in the batch.

    >>> samples_of(range(3, 6), 2, 12), samples_of(range(3, 6), JOINED, 12)
    ((range(3, 6), [range(0, 3), range(0, 1), range(1, 3)]), (range(3, 9), [range(0, 6), range(0, 3), range(3, 6)]))
    """
    if number == JOINED:
        size, number = len(samples), 2
        start = samples.start if samples.stop < batch_size else max(0, samples.start - size)
        samples = range(start, min(start + 2 * size, batch_size), samples.step)
    size = len(samples)
    cuts = [size * part // number for part in range(number + 1)]
    return samples, [range(size), *map(range, cuts, cuts[1:])]


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


def gradient_share(value: torch.Tensor, share: float, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
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
def without_batch_statistics(model: nn.Module) -> Iterator[None]:
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
