"""Decide which snapshots of a run may be removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.integers import check_integer


@dataclass(frozen=True)
class Kept:
    """What is known of a snapshot for deciding about it.

    Attributes:
        path: The folder.
        update: The number of updates.
        metrics: Numbers that describe the snapshot.
        ranks: The number of ranks that had the same bits; 0 if they have not compared them.
    """

    path: Path
    update: int
    metrics: Mapping[str, float]
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which snapshots are kept.

    Attributes:
        keep: The number of newest snapshots to keep, at least 1.
        best: The metric by which one more snapshot is kept; None for no such snapshot.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is the best one.
    """

    keep: int = 3
    best: str | None = None
    mode: str = "max"

    def __post_init__(self) -> None:
        check_integer("keep", self.keep, minimum=1)
        if self.mode not in {"max", "min"}:
            raise ValueError(f'`mode` must be "max" or "min", got {self.mode!r}.')

    def removable(self, found: Sequence[Kept], newest: Kept) -> list[Kept]:
        """Return the snapshots that are neither among the newest nor the best one nor the last one ranks agreed on.

        Args:
            found: The snapshots of the run.
            newest: The snapshot that was written last, which is kept in any case.

        >>> found = [Kept(Path(str(update)), update, {"a": -update}, int(update == 1)) for update in range(5)]
        >>> [each.update for each in Retention(keep=2, best="a").removable(found, found[4])]
        [2]
        """
        ordered = sorted(found, key=lambda each: each.update)
        staying = [newest, *ordered[-self.keep :], *[each for each in ordered if each.ranks][-1:]]
        best: Kept | None = None
        for each in ordered:
            if self.is_better(each.metrics, None if best is None else best.metrics):
                best = each
        return [each for each in ordered if each not in staying and each is not best]

    def is_better(self, metrics: Mapping[str, float], than: Mapping[str, float] | None) -> bool:
        """Return whether one snapshot is better than another; of equal values, the first one stays the best.

        Args:
            metrics: The numbers that describe the snapshot. It is never better without a number for `best`.
            than: Those of the best one so far; None if there is none.

        >>> Retention(best="a").is_better({"a": 2.0}, {"a": 1.0}), Retention(best="a").is_better({"a": 1.0}, {"a": 1.0})
        (True, False)
        """
        if self.best is None or math.isnan(value := metrics.get(self.best, math.nan)):
            return False
        if than is None:
            return True
        return value > than[self.best] if self.mode == "max" else value < than[self.best]
