"""Logs are read whatever is in them, thinned out without losing an extreme, and compared."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest

from lockstep.html_report import read_run, render
from lockstep.html_report.log import Log, Series, as_json, first_difference, read_log, thin


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in entries))
    return path


def log(path: Path, **values: list[Any]) -> Log:
    count = len(next(iter(values.values())))
    entries = [{"iteration": i + 1, **{name: each[i] for name, each in values.items()}} for i in range(count)]
    found = read_log(write(path, *entries))
    assert found is not None
    return found


def test_values_of_any_kind_and_lines_that_are_no_entries(tmp_path: Path) -> None:
    first = {"iteration": 1, "epoch": 0, "epoch_detail": 0.5, "elapsed_time": 2.0, "loss": "nan", "<b>": "-inf"}
    later = {"iteration": 4, "epoch_detail": 2.0, "elapsed_time": 3.0, "loss": 1.5}
    cut = '{"iteration": 5, "lo'
    found = read_log(
        write(tmp_path / "log", first, later, "[1]\n", "null\n", {"loss": 1}, {"iteration": 6, "loss": []}, cut)
    )
    assert found is not None
    assert (found.num_entries, found.unreadable) == (2, 5)
    assert list(found.series) == ["loss", "<b>"]
    assert list(found.series["loss"].updates) == [1, 4]
    assert math.isnan(found.series["loss"].values[0])
    assert list(found.series["<b>"].values) == [-math.inf]
    assert list(found.epochs.values) == [0.5, 2.0]
    assert list(found.times.values) == [2.0, 3.0]


def test_what_a_log_repeats_replaces_what_it_had(tmp_path: Path) -> None:
    entries = [{"iteration": update, "loss": float(index)} for index, update in enumerate([1, 2, 3, 2, 3])]
    found = read_log(write(tmp_path / "log", *entries))
    assert found is not None
    assert list(found.series["loss"].points()) == [(1, 0), (2, 3), (3, 4)]


def test_a_repetition_may_lack_a_name(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", {"iteration": 1, "loss": 2.0}, {"iteration": 1})
    assert "<h1>" in render(read_run(tmp_path))


def test_there_need_not_be_a_log(tmp_path: Path) -> None:
    assert read_log(tmp_path / "log") is None


@pytest.mark.parametrize("bins", [1, 2, 7, 100])
def test_thinning_keeps_extremes_ends_and_what_is_not_finite(bins: int) -> None:
    values = [math.sin(i / 7) * i for i in range(1000)]
    values[333], values[334], values[700] = math.nan, math.nan, math.inf
    series = Series(array("d", range(0, 3000, 3)), array("d", values))
    points = thin(series, bins)
    finite = [value for value in values if math.isfinite(value)]
    kept = [point.value for point in points]
    assert {min(finite), max(finite), values[0], values[-1], math.inf} <= set(kept)
    assert sum(map(math.isnan, kept)) == 1
    assert len(points) <= 2 * bins + 4
    assert points == sorted(points, key=lambda point: point.update)
    assert {point.update for point in points} <= set(series.updates)


def test_points_are_json() -> None:
    series = Series(array("d", [1, 2.5, 3]), array("d", [math.inf, -math.inf, 1 / 3]))
    assert as_json(list(series.points())) == {"x": [1, 2.5, 3], "y": ["inf", "-inf", 0.333333333]}


def test_the_first_entry_that_differs(tmp_path: Path) -> None:
    one = log(tmp_path / "one", loss=[3.0, "nan", 1.0, 0.5], rate=[1, 1, 1, 1], **{"throughput/updates": [9, 9, 9, 9]})
    other = log(
        tmp_path / "two", loss=[3.0, "nan", 1.0, 0.25], rate=[1, 1, 2, 1], **{"throughput/updates": [8, 9, 9, 9]}
    )
    assert first_difference(one, one) is None
    assert first_difference(one, other) == (3, ["rate"])


def test_only_updates_of_both_logs_are_compared(tmp_path: Path) -> None:
    one = read_log(write(tmp_path / "one", *({"iteration": i, "loss": i} for i in (1, 3, 5))))
    other = read_log(
        write(tmp_path / "two", *({"iteration": i, "loss": 2 * i if i == 5 else i + i % 2 - 1} for i in (2, 3, 5)))
    )
    assert one is not None
    assert other is not None
    assert first_difference(one, other) == (5, ["loss"])
    assert first_difference(other, one) == (5, ["loss"])
