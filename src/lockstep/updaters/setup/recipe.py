"""The recipe of an update: the arguments of an updater that the result depends on, besides what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

from torch import nn
from torch.nn.modules.loss import _Loss

from lockstep.arguments import check_bool, check_choice, check_integer, misfit
from lockstep.precision import Precision, parse_precision
from lockstep.replicas import BatchDim, BufferRules, check_dims, check_rules
from lockstep.updaters.loss import BatchLoss, LossFunction, supervised
from lockstep.updaters.setup.batches import Converter
from lockstep.updaters.token_mean import token_mean

Accumulation: TypeAlias = "int | Mapping[int, int] | Callable[[int], int]"
"""The number of batches of one update; or a mapping from the epoch at which a number begins to hold, to the number; or
a function of the epoch. Epochs count from 0."""

FUNCTION_LIMIT: Final = 256
"""The largest number of batches that a function may return. The random streams of an update begin at a multiple of the
largest possible number, and that of a function cannot be known in advance."""


def check_accumulation(accumulate: object) -> None:
    """Check that an argument says how many batches an update accumulates.

    Args:
        accumulate: The value to check.

    Raises:
        TypeError: If it is neither an integer, nor a mapping of integers, nor callable.
        ValueError: If a number is less than 1, an epoch less than 0, or a mapping is empty.
    """
    if isinstance(accumulate, Mapping):
        if not accumulate:
            raise ValueError("`accumulate` must name at least one epoch, got an empty mapping.")
        for epoch, number in accumulate.items():
            check_integer("epoch in accumulate", epoch, minimum=0)
            check_integer(f"accumulate[{epoch}]", number, minimum=1)
    elif isinstance(accumulate, int):
        check_integer("accumulate", accumulate, minimum=1)
    elif not callable(accumulate):
        raise TypeError(
            "`accumulate` must be an integer, a dict such as {0: 8, 4: 2}, or a function of the epoch, got "
            f"{accumulate!r}."
        )


def batches_per_update(accumulate: Accumulation, epoch: int) -> int:
    """Return the number of batches of an update.

    Args:
        accumulate: The number, or one for each epoch.
        epoch: The number of complete epochs before the update.

    Raises:
        TypeError: If a function returned something else than an integer.
        ValueError: If a function returned a number that is not in 1..256.

    >>> [batches_per_update({0: 8, 4: 2}, epoch) for epoch in (0, 3, 4, 9)]
    [8, 8, 2, 2]
    >>> batches_per_update({5: 4}, 0)  # before the first epoch that is named
    1
    """
    if isinstance(accumulate, int):
        return accumulate
    if isinstance(accumulate, Mapping):
        begun = [each for each in accumulate if each <= epoch]
        return accumulate[max(begun)] if begun else 1
    number = accumulate(epoch)
    check_integer(f"accumulate({epoch})", number, minimum=1)
    if number > FUNCTION_LIMIT:
        raise ValueError(
            f"`accumulate({epoch})` must be at most {FUNCTION_LIMIT}, got {number}. Pass larger numbers in a mapping, "
            "such as {0: 1024}."
        )
    return number


def most_batches(accumulate: Accumulation) -> int:
    """Return the largest number of batches that an update may have.

    Args:
        accumulate: The number, or one for each epoch.

    >>> most_batches(4), most_batches({2: 8, 4: 2}), most_batches(lambda epoch: epoch + 1)
    (4, 8, 256)
    """
    if isinstance(accumulate, int):
        return accumulate
    return max(accumulate.values()) if isinstance(accumulate, Mapping) else FUNCTION_LIMIT


CRITERIA_MODULES: Final = frozenset({"torch.nn.functional", "torch._C._nn"})
"""The modules of PyTorch's criteria that are functions."""

Split = Literal["contiguous", "strided"]
Reduction = Literal["mean", "sum"]
OnOverflow = Literal["retry", "next", "skip"]
OnExhausted = Literal["skip", "raise"]
StepFunction: TypeAlias = Callable[[Any, Any], object]
"""Called as ``step_fn(updater, batch)``; its return value is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an update computes, wherever it runs. Each attribute is the argument of `ParallelUpdater` with its name.

    Raises:
        TypeError: If a count or the seed is not an integer, or if a function cannot be called.
        ValueError: If a count is less than 1, or if an option is not one of the allowed strings.
    """

    num_shards: int | None
    seed: int
    accumulate: Accumulation
    split: Split
    reduction: Reduction
    precision: str
    buffers: BufferRules
    on_overflow: OnOverflow
    max_tries: int
    on_exhausted: OnExhausted
    max_skipped: int | None
    auto_new_epoch: bool
    loss_fn: LossFunction | None
    step_fn: StepFunction | None
    converter: Converter
    batch_dim: BatchDim
    clip_grad_norm: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.num_shards is not None:
            check_integer("num_shards", self.num_shards, minimum=1)
        check_accumulation(self.accumulate)
        check_integer("max_tries", self.max_tries, minimum=1)
        if self.max_skipped is not None:
            check_integer("max_skipped", self.max_skipped, minimum=1)
        check_integer("seed", self.seed)
        check_bool("auto_new_epoch", self.auto_new_epoch)
        check_dims(self.batch_dim, "batch_dim")
        choices = {"split": Split, "reduction": Reduction, "on_overflow": OnOverflow, "on_exhausted": OnExhausted}
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), get_args(allowed))
        check_rules(self.buffers)
        parse_precision(self.precision)
        if self.converter is None:
            raise TypeError("`converter` must be callable, got a NoneType.")
        check_functions(converter=self.converter, loss_fn=self.loss_fn, step_fn=self.step_fn)

    @property
    def precision_policy(self) -> Precision:
        """The precision policy."""
        return parse_precision(self.precision)

    def check_custom_step(self) -> None:
        """Check that no option is set that a step function cannot follow.

        Raises:
            ValueError: If there is such an option.
        """
        several = "a BatchLoss" if isinstance(self.loss_fn, BatchLoss) else "a step function or LBFGS"
        if self.accumulate != 1:
            raise ValueError(
                f"`accumulate` must be 1 with {several}, got {self.accumulate}. Use larger batches with more shards "
                "instead."
            )
        if self.on_overflow == "next":
            raise ValueError(f"`on_overflow` must be 'retry' or 'skip' with {several}, got 'next'.")


def check_functions(*, converter: object = None, loss_fn: object = None, step_fn: object = None) -> None:
    """Check that functions can be called, and that the loss function is not a criterion, which takes no model.

    Args:
        converter: The converter, or None.
        loss_fn: The loss function, or None.
        step_fn: The step function, or None.

    Raises:
        TypeError: If a function cannot be called, or if the loss function is a criterion.
    """
    # A criterion is callable too, and would otherwise only fail inside the first shard.
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise TypeError(
            f"`loss_fn` must be a function of the model and the batch, got the class {function.__name__}. Pass "
            f"lockstep.supervised({function.__name__}()) if it is a criterion."
        )
    for maker, call in ((supervised, "supervised(criterion)"), (token_mean, "token_mean()")):
        if function is maker:
            name = maker.__name__
            raise TypeError(f"`loss_fn` must be what {name} returns, got {name} itself. Pass {call}.")
    if isinstance(function, _Loss) or getattr(function, "__module__", None) in CRITERIA_MODULES:
        kind = getattr(function, "__name__", type(function).__name__)
        given = f"{kind}(...)" if isinstance(function, _Loss) else kind
        raise TypeError(
            f"`loss_fn` must take the model before the batch, got a criterion, {kind}. Pass "
            f"lockstep.supervised({given})."
        )
    for name, function in {"converter": converter, "loss_fn": loss_fn, "step_fn": step_fn}.items():
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be callable, got a {type(function).__name__}.")
    for name, each, arguments, call in (
        (
            "converter",
            converter,
            "samples, device",
            "collator(list(samples)).to(device) with your function as collator",
        ),
        ("step_fn", step_fn, "updater, batch", "... that calls it"),
    ):
        # Collators of transformers take a second argument, which is no device: it would have two values.
        reason = misfit(each, *arguments.split(", "), return_tensors="pt") if callable(each) else ""
        if reason and "unexpected keyword" not in reason:
            kind = getattr(each, "__name__", type(each).__name__)
            raise TypeError(
                f"`{name}` must be called as {name}({arguments}), got {kind}, which does not take these two. Pass "
                f"lambda {arguments}: {call}."
            )
