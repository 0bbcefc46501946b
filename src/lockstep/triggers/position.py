"""The position of a run in one of the units of time, and comparisons that tolerate rounding."""

from __future__ import annotations

import math
from typing import get_args

from lockstep.triggers.trigger import Progress, Unit


def check_unit(unit: str) -> None:
    """Check that a string is a unit.

    Raises:
        ValueError: If it is not.
    """
    if unit not in get_args(Unit):
        raise ValueError(f"`unit` must be one of {', '.join(map(repr, get_args(Unit)))}, got {unit!r}.")


def position(progress: Progress, unit: Unit) -> float:
    """Return the position of a run in a unit.

    Raises:
        ValueError: If the unit is ``"sample"`` and the iterator does not count samples.

    Determinism: iterations, epochs and samples are equal on all processes of a run. Seconds are not: do not let
    anything that all processes must do together depend on them.
    """
    if unit == "epoch":
        return progress.updater.epoch_detail
    if unit == "second":
        return progress.elapsed_time
    if unit == "sample":
        passed = progress.updater.samples_passed
        if passed is None:
            kind = type(progress.updater.get_iterator("main")).__name__
            raise ValueError(
                f"`unit` must not be 'sample' for an iterator that counts batches, got a {kind}. Use 'iteration' or "
                "'epoch', or a lockstep.BatchIterator."
            )
        return passed
    return progress.updater.iteration


def reached(current: float, point: float) -> bool:
    """Return whether a position is at a point or beyond it, up to rounding errors.

    >>> 0.1 + 0.2 >= 0.3, 0.7 + 0.1 >= 0.8, reached(0.7 + 0.1, 0.8)
    (True, False, True)
    """
    return current >= point or _is_close(current, point)


def num_completed(current: float, period: float) -> int:
    """Count the periods that are completed at a position, up to rounding errors.

    >>> math.floor(0.3 / 0.1), num_completed(0.3, 0.1)
    (2, 3)
    """
    # Counts of updates and epochs are exact, and are compared in every update.
    if type(current) is int and type(period) is int:
        return current // period
    nearest = round(current / period)
    return nearest if _is_close(current / period, nearest) else math.floor(current / period)


def _is_close(a: float, b: float) -> bool:
    """Return whether two positions are equal up to rounding errors."""
    # A billionth of an epoch is less than one sample, and the rounding error of a million additions is less than that.
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9)
