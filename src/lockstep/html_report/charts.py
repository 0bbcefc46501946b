"""Choose the charts of a page, and thin out their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from lockstep.html_report.log import Log, Series, as_json, thin
from lockstep.html_report.run import RunData

POINTS: Final = 300_000
"""The largest number of points on a page, about 5 MB."""
BINS: Final = (100, 2000)
"""The smallest and the largest number of bins that the values of a name are thinned out to."""
POSITIONS: Final = 1000
"""The number of bins of the epochs and times, between which the page interpolates."""
THROUGHPUT: Final = "throughput/"
LOAD: Final = "throughput/load/"
RATE: Final = "updates per second"
SCALE: Final = "loss scale"
RETRIES: Final = "retries"


@dataclass(frozen=True)
class Charts:
    """The charts of a page.

    Attributes:
        curves: The titles of the charts of logged values, with their names.
        scaling: Those of the loss scale, retries and skipped updates that change.
        constant: The others with the values that they have throughout, those of all runs.
        throughput: Those of rates and memory.
        runs: For each run its name, its positions and the values by name, as the script of the page reads them.
        bins: The number of bins that values were thinned out to; None if all are there.
    """

    curves: list[tuple[str, list[str]]]
    scaling: list[tuple[str, list[str]]]
    constant: list[str]
    throughput: list[tuple[str, list[str]]]
    runs: list[dict[str, Any]]
    bins: int | None


def choose_charts(runs: Sequence[RunData]) -> Charts:
    """Return the charts that show one run or several.

    Args:
        runs: The runs.
    """
    series = [_all_series(run) for run in runs]
    names = list(dict.fromkeys(name for each in series for name in each))
    smallest, largest = BINS
    bins = min(max(POINTS // (2 * sum(map(len, series)) or 1), smallest), largest)
    is_thinned = any(len(each.updates) > 2 * bins for found in series for each in found.values())
    rates = [name for name in names if name.startswith(THROUGHPUT) or name == RATE]
    loads = [name for name in rates if name.startswith(LOAD)]
    scaling = [name for name in names if name in {SCALE, RETRIES} or _last_part(name) == "skipped"]
    changing = [name for name in scaling if any(len(set(found[name].values)) > 1 for found in series if name in found)]
    curves: dict[str, list[str]] = {}
    for name in names:
        if name not in rates and name not in scaling:
            curves.setdefault(_last_part(name), []).append(name)
    return Charts(
        curves=list(curves.items()),
        scaling=[(name, [name]) for name in changing],
        constant=[
            f"{name}: {', '.join(dict.fromkeys(f'{each[name].values[0]:g}' for each in series if name in each))}"
            for name in scaling
            if name not in changing
        ],
        throughput=[(name, [name]) for name in rates if name not in loads] + ([("load", loads)] if loads else []),
        runs=[
            {
                "name": run.name,
                "positions": _positions(run.log),
                "series": {name: as_json(thin(each, bins)) for name, each in found.items()},
            }
            for run, found in zip(runs, series, strict=True)
        ],
        bins=bins if is_thinned else None,
    )


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]


def _all_series(run: RunData) -> dict[str, Series]:
    """Return all values of a run over updates, also those that are not in its log."""
    log = run.log
    found = {} if log is None else dict(log.series)
    # Not mixed with values that are logged under these names.
    found |= {SCALE: Series(), RETRIES: Series()} if run.final_intervals else {}
    for interval in run.final_intervals:
        found[SCALE].append(interval.update, interval.loss_scale)
        found[RETRIES].append(interval.update, interval.retries)
    if log is not None and not any(name.startswith(THROUGHPUT) for name in found):
        rates = _rates(log)
        if rates.updates:
            found[RATE] = rates
    return found


def _rates(log: Log) -> Series:
    """Return the updates per second between the entries of a log."""
    rates = Series()
    for (before, begin), (update, end) in pairwise(log.times.points()):
        if end > begin:
            rates.append(update, (update - before) / (end - begin))
    return rates


def _positions(log: Log | None) -> dict[str, list[Any]]:
    """Return the epochs and times over updates."""
    found: dict[str, list[Any]] = {"epoch": [[], []], "time": [[], []]}
    for unit, series in () if log is None else (("epoch", log.epochs), ("time", log.times)):
        points = as_json([point for point in thin(series, POSITIONS) if math.isfinite(point.value)])
        found[unit] = [points["x"], points["y"]]
    return found
