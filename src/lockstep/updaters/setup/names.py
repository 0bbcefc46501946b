"""Accept one thing or several by name, and refuse what does not belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.data import Iterator, Source, as_iterator

MAIN = "main"

Names = tuple[str, ...]
"""The optimizers that a gradient is for."""

T = TypeVar("T")


def by_name(argument: str, given: Any, kind: type[Any], what: str) -> dict[str, Any]:
    """Register a single object as "main", or several under their names.

    Args:
        argument: What errors call the argument.
        given: An object or a mapping.
        kind: What each object must be.
        what: The same in words.

    Raises:
        TypeError: Something is of another kind.
        ValueError: There is none, a name has no letters or holds a dot, or one object has two names.

    >>> by_name("model", 3, int, "an integer")
    {'main': 3}
    """
    if not isinstance(given, Mapping):
        if not isinstance(given, kind):
            raise TypeError(f"`{argument}` must be {what}, got a {type(given).__name__}.")
        return {MAIN: given}
    if not given:
        raise ValueError(f"`{argument}` must hold at least one, got an empty mapping.")
    seen: dict[int, str] = {}
    for name, each in given.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"The names of `{argument}` must be words without dots, got {name!r}.")
        if not isinstance(each, kind):
            raise TypeError(f"`{argument}[{name!r}]` must be {what}, got a {type(each).__name__}.")
        if id(each) in seen:
            both = f"{seen[id(each)]!r} and {name!r}"
            raise ValueError(f"`{argument}` must hold different objects, got the same one as {both}.")
        seen[id(each)] = name
    return dict(given)


def iterators_by_name(given: Iterator | Source | Mapping[str, Iterator | Source]) -> dict[str, Iterator]:
    """Register one source of batches as "main", or several under their names, as iterators.

    Raises:
        TypeError: Something is no source of batches.
        ValueError: As `by_name`, or none is named "main".
    """
    if isinstance(given, Mapping):
        adapted: Any = {name: as_iterator(each, name=f"iterator[{name!r}]") for name, each in given.items()}
    else:
        adapted = as_iterator(given)
    iterators: dict[str, Iterator] = by_name("iterator", adapted, Iterator, "a lockstep Iterator")
    if MAIN not in iterators:
        raise ValueError(f"`iterator` must have one named 'main', got {sorted(iterators)}.")
    return iterators


def look_up(name: str, named: Mapping[str, T]) -> T:
    """Give what has this name.

    Raises:
        KeyError: Nothing has; the message lists the names there are.
    """
    if name not in named:
        raise KeyError(f"`name` must be one of {sorted(named)}, got {name!r}.")
    return named[name]


def named_schedulers(argument: str, given: Any, optimizers: Mapping[str, Optimizer]) -> dict[str, LRScheduler]:
    """Give schedulers by name: of a single one "main", of a sequence their numbers.

    Args:
        argument: What errors call the argument.
        given: A scheduler, a sequence or a mapping of them, or None.
        optimizers: Whose rates they may change.

    Raises:
        TypeError: Something is no scheduler, or one that waits for a measured value.
        ValueError: One belongs to another optimizer.
    """
    if given is None:
        return {}
    if isinstance(given, Sequence):
        given = {str(index): scheduler for index, scheduler in enumerate(given)}
        if not given:
            return {}
    found = by_name(argument, given, LRScheduler, "a torch.optim.lr_scheduler.LRScheduler")
    own = {id(optimizer) for optimizer in optimizers.values()}
    for name, scheduler in found.items():
        if id(scheduler.optimizer) not in own:
            raise ValueError(f"`{argument}` must hold schedulers of the updater's optimizers, got {name!r} of another.")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"`{argument}` must hold schedulers that step without a measured value, got {name!r}, a "
                "ReduceLROnPlateau. Step it in an extension of the trainer."
            )
    return found
