"""Check the plain arguments of an updater."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.integers import check_integer
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale, asks_for_closure, parse_loss_scale


def check_counts(*, num_shards: int | None, **counts: int) -> None:
    """Refuse counts below 1; only the number of shards may be left open.

    Raises:
        TypeError: One is no integer.
        ValueError: One is too small.
    """
    if num_shards is not None:
        check_integer("num_shards", num_shards, minimum=1)
    for name, count in counts.items():
        check_integer(name, count, minimum=1)


def check_kinds(*, converter: object, loss_fn: object, step_fn: object, communicator: object) -> None:
    """Refuse what cannot be called, a criterion, which does not know the model, and what joins no processes.

    All but the converter may be None, for none.

    Raises:
        TypeError: There is one.
    """
    if isinstance(loss_fn, _Loss):
        kind = type(loss_fn).__name__
        raise TypeError(
            f"`loss_fn` must take the model before the batch, got a criterion, {kind}. Give "
            f"lockstep.supervised({kind}(...))."
        )
    optional = {"loss_fn": loss_fn, "step_fn": step_fn}
    given = {"converter": converter} | {name: each for name, each in optional.items() if each is not None}
    for name, function in given.items():
        if not callable(function):
            raise TypeError(f"`{name}` must be callable, got a {type(function).__name__}.")
    if not isinstance(communicator, Communicator | None):
        raise TypeError(
            f"`communicator` must be a Communicator or None, got a {type(communicator).__name__}."
        )


def check_choice(name: str, choice: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not one of those there are.

    Raises:
        ValueError: It is not.
    """
    if choice not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {choice!r}.")


def check_sharding(
    *, num_shards: int | None, split: str, workloads: Sequence[float] | str | None
) -> Sequence[float] | None:
    """Check what says how a batch is cut and given out.

    Returns:
        The workloads, None where they are to be measured.

    Raises:
        ValueError: Workloads would change the result, or are no numbers.
    """
    check_choice("split", split, ("contiguous", "strided"))
    if isinstance(workloads, str):
        check_choice("workloads", workloads, ("auto",))
        if num_shards is None:
            raise ValueError(
                '`workloads` must be numbers where `num_shards` is None, got "auto". Shards would be sized '
                "by what was measured, and so would the result; give a number of shards."
            )
        return None
    if num_shards is None and split == "strided" and workloads is not None and len(set(workloads)) > 1:
        raise ValueError(
            f"`workloads` must be equal where samples are dealt round robin to one shard a device, got "
            f"{list(workloads)}. Give a number of shards."
        )
    return workloads


def check_closures(optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers whose step computes gradients by itself.

    Raises:
        TypeError: There is one, such as `torch.optim.LBFGS`.
    """
    for optimizer in optimizers.values():
        if asks_for_closure(optimizer):
            raise TypeError(
                "`optimizer` must step by the gradients that are there, got "
                f"{type(optimizer).__name__}, whose step() asks for a closure that computes them anew."
            )


def chosen_scale(given: LossScale | float | None, optimizers: Mapping[str, Optimizer]) -> LossScale:
    """Take the loss scale that is given, or else the one that optimizers were given, or else 1.

    Raises:
        TypeError: What is given is no loss scale.
        ValueError: It is out of range, or optimizers have several.
    """
    if given is not None:
        return parse_loss_scale(given)
    own = {each.loss_scale for each in optimizers.values() if isinstance(each, HookedOptimizer)} - {None}
    if len(own) > 1:
        raise ValueError(
            "`loss_scale` must be given for optimizers that have loss scales of their own, which differ: "
            f"got None, and {sorted(map(repr, own))}."
        )
    return parse_loss_scale(own.pop() if own else None)


def check_step(*, accumulate: int, on_overflow: str) -> None:
    """Refuse options of the usual update where a step function says what an update does.

    Raises:
        ValueError: There is one.
    """
    if accumulate > 1:
        raise ValueError(
            f"`accumulate` must be 1 where a step function says what an update does, got {accumulate}. Give "
            "it larger batches and more shards."
        )
    if on_overflow == "next":
        raise ValueError(
            "`on_overflow` must be 'retry' or 'skip' where a step function says what an update does, got "
            "'next'."
        )


def check_flat(optimizers: Mapping[str, Optimizer], *, takes_steps: bool) -> None:
    """Refuse one tensor for gradients that do not belong together.

    Raises:
        ValueError: There are several optimizers, steps of the user's own, or several dtypes.
    """
    if takes_steps or len(optimizers) > 1:
        raise ValueError(
            "`flat_gradients` must be False with several optimizers or a step function, got True."
        )
    (optimizer,) = optimizers.values()
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if len(dtypes) > 1:
        raise ValueError(f"`flat_gradients` must be False for parameters of several dtypes, got {dtypes}.")
