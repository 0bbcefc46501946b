"""Read how many batches an update accumulates: a number, or one for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from lockstep.arguments import check_integer

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
