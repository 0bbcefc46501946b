"""The batch is split by work load as MXNet does it, or better: each case differs only where it is listed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
from torch import nn
from traces import Case, cases, read_differences

import lockstep as ls

FILE = "mxnet-nnabla/mxnet_slices.json"
RECORDED = cases(FILE, 620, given=["*"], differ=False)
LISTED = [each for each in read_differences() if each.file == FILE and each.through == "core"]


def by_workloads() -> list[Any]:
    """Take together what was recorded for the same loads: the lengths of the slices for each batch size."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"loads": [], "sizes": [], "lengths": []})
    for case in [parameter.values[0] for parameter in RECORDED if isinstance(parameter.values[0], Case)]:
        together = found[" ".join(map(str, case["work_load_list"])) or "none"]
        together["loads"] = case["work_load_list"]
        together["sizes"].append(case["batch_size"])
        together["lengths"].append(lengths(case["python3"]))
    given = ["loads", "sizes"]
    return [
        pytest.param(Case(name, content, {}, given, [each for each in LISTED if fnmatchcase(name, each.case)]))
        for name, content in found.items()
    ] or RECORDED


def lengths(recorded: Any) -> list[int] | str:
    if "error" in recorded:
        return "refused"
    return [stop - start for start, stop in recorded["slices"]]


def ours(size: int, loads: Sequence[float]) -> list[int] | str:
    """Split as a group does."""
    try:
        with ls.ReplicaGroup(nn.Identity(), ["cpu"] * len(loads), workloads=loads) as group:
            group.bind(data=[("input", (size,))])
            return [run.stop - run.start for run in group.slices]
    except ValueError:
        return "refused"


@pytest.mark.parametrize("case", by_workloads())
def test_workloads(case: Case) -> None:
    case.check({"lengths": [ours(size, case["loads"]) for size in case["sizes"]]})


def test_every_listed_difference_is_for_some_workloads() -> None:
    names = [parameter.values[0].name for parameter in by_workloads() if parameter.values[0] is not None]
    for listed in LISTED:
        assert not names or any(fnmatchcase(name, listed.case) for name in names), listed


@pytest.mark.parametrize("load", [float("nan"), float("inf")])
def test_loads_that_are_no_numbers_are_refused(load: float) -> None:
    assert ours(4, [load, 1.0]) == "refused"
