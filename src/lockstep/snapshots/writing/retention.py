"""Decide which snapshots of a run may be removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.integers import check_integer
from lockstep.snapshots.format import Manifest


@dataclass(frozen=True)
class Kept:
    """What the manifest of a snapshot says for deciding about it.

    Attributes:
        path: The folder.
        update: The number of updates.
        metrics: Numbers that describe the snapshot.
    """

    path: Path
    update: int
    metrics: Mapping[str, float]


def kept(path: Path, manifest: Manifest) -> Kept:
    """Return what a manifest says for deciding about its snapshot."""
    return Kept(path, manifest.update, manifest.metric_values)


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
        """Return the snapshots that are neither among the newest nor the best one.

        Args:
            found: The snapshots of the run.
            newest: The snapshot that was written last, which is kept in any case.

        >>> found = [Kept(Path(str(update)), update, {"a": -update}) for update in range(4)]
        >>> [each.update for each in Retention(keep=2, best="a").removable(found, found[3])]
        [1]
        """
        ordered = sorted(found, key=lambda each: each.update)
        staying = {newest.path, *(each.path for each in ordered[-self.keep :])}
        if self.best is not None:
            # Of equal values the first one stays.
            sign = 1.0 if self.mode == "max" else -1.0
            values = [(sign * each.metrics.get(self.best, float("nan")), each.path) for each in ordered]
            valued = [each for each in values if not math.isnan(each[0])]
            staying |= {max(valued, key=lambda each: each[0])[1]} if valued else set()
        return [each for each in ordered if each.path not in staying]
