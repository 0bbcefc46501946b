"""How far a run has come, in one of the units of time, and which marks it has passed."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from lockstep.triggers.trigger import Progress

Unit: TypeAlias = Literal["iteration", "update", "epoch", "second"]
"""``"iteration"`` and ``"update"`` both count the updates done; ``"second"`` is the run's elapsed time."""


def check_unit(unit: str) -> None:
    """Refuse a word that is no unit.

    Raises:
        ValueError: It is none.
    """
    if unit not in get_args(Unit):
        raise ValueError(f"`unit` must be one of {', '.join(map(repr, get_args(Unit)))}, got {unit!r}.")


def position(progress: Progress, unit: Unit) -> float:
    """Return how far a run has come.

    Determinism: iterations and epochs are equal on all processes of a run; seconds are not, so
    what all processes must do together must not hang on them.
    """
    if unit == "epoch":
        return progress.updater.epoch_detail
    if unit == "second":
        return progress.elapsed_time
    return progress.updater.iteration


def reached(place: float, mark: float) -> bool:
    """Say whether a place lies at a mark or beyond, forgiving the rounding of fractions.

    >>> 0.1 + 0.2 >= 0.3, 0.7 + 0.1 >= 0.8, reached(0.7 + 0.1, 0.8)
    (True, False, True)
    """
    return place >= mark or _same(place, mark)


def completed(place: float, period: float) -> int:
    """Count the periods that lie wholly before a place, forgiving the rounding of fractions.

    >>> math.floor(0.3 / 0.1), completed(0.3, 0.1)
    (2, 3)
    """
    nearest = round(place / period)
    return nearest if _same(place / period, nearest) else math.floor(place / period)


def _same(a: float, b: float) -> bool:
    # A billionth of an epoch is less than one sample; sums of a million fractions stray less than that.
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9)
