"""MXNet's rule for cutting a batch, in both of its languages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces import Case, cases

from lockstep.compat.mxnet import split_input_slice

FILE = "mxnet-nnabla/mxnet_slices.json"
COLUMNS = {"python": "python3", "scala": "scala_derived"}


def name(content: Any) -> str:
    return f"{content['batch_size']} by {content['work_load_list']}"


def without_message(column: Any) -> Any:
    """Keep of an error that there is one: kinds of failure have other names here."""
    return {"error": True} if column is not None and "error" in column else column


def cut(case: Case, rule: Any) -> Any:
    try:
        slices = split_input_slice(case["batch_size"], case["work_load_list"], rule=rule)
    except ValueError:
        return {"error": True}
    return {"slices": [[each.start, each.stop] for each in slices]}


GIVEN = ["batch_size", "work_load_list"]


CASES = [each.values[0] for each in cases(FILE, 620, given=GIVEN, name=name, through="compat")]
needs_traces = pytest.mark.skipif(CASES[0] is None, reason="no reference folder")


@needs_traces
def test_both_languages() -> None:
    for case in CASES:
        kept = {column: without_message(case[column]) for column in COLUMNS.values()}
        ours = {column: cut(case, rule) for rule, column in COLUMNS.items()}
        replace(case, content={**case.content, **kept}).check(ours)


@needs_traces
def test_loads_that_are_not_finite() -> None:
    entries = CASES[0].shared["non_finite"]
    assert entries
    for entry in entries:
        assert "error" in entry["python3"]
        with pytest.raises(ValueError, match="must have a finite sum"):
            split_input_slice(entry["batch_size"], [float(load) for load in entry["work_load_list"]])


def test_the_two_languages_differ() -> None:
    assert split_input_slice(5, [1, 1]) == [slice(0, 2), slice(2, 5)]
    assert split_input_slice(5, [1, 1], rule="scala") == [slice(0, 3), slice(3, 5)]
