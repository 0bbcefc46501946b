"""MXNet's metrics over a group: per device what the original counts, merged what one device counts."""

from __future__ import annotations

from typing import Any

import pytest
from mxnet_metrics import metric
from torch import nn
from traces import Case, Tolerance, cases, equal, tensor

import lockstep as ls

CASES = cases(
    "mxnet-nnabla/mxnet_metrics.json",
    num_cases=25,
    given=["metric", "kwargs", "kind", "batches", "runs.*.work_load_list", "runs.*.note"],
    name=lambda content: "-".join([content["metric"], *map(str, (content["kwargs"] or {}).values())]),
)
# The original sums in float32 where we sum in float64.
TOLERANCES = {"*": Tolerance(1e-6)}


def replay(case: Case, slices: list[list[int]], *, per_device: bool) -> dict[str, Any]:
    """Count all batches, each cut as the original cut it; its rule is replayed in `test_mxnet_slices.py`."""
    workloads = [float(stop - start) for start, stop in slices]
    classes = case["batches"][0]["pred"]["shape"][-1]
    counted = metric(case["metric"], case["kwargs"], classes)
    records = []
    with ls.ReplicaGroup(nn.Identity(), ["cpu"] * len(workloads), workloads=workloads) as group:
        for batch in case["batches"]:
            group.forward(tensor(batch["pred"]))
            group.update_metric(counted, tensor(batch["label"]), per_device=per_device)
            records.append(counted.record())
            if len(records) == 1:
                counted.reset_local()
        return {"slices": [[run.start, run.stop] for run in group.slices], "after_each_update": records}


@pytest.mark.parametrize("case", CASES)
def test_replay(case: Case) -> None:
    slices = [run["slices"] for run in case["runs"]]
    case.check({"runs": [replay(case, each, per_device=True) for each in slices]}, TOLERANCES)


@pytest.mark.parametrize("case", CASES)
def test_merged_a_metric_does_not_depend_on_the_devices(case: Case) -> None:
    alone, *others = [replay(case, run["slices"], per_device=False) for run in case["runs"]]
    for other in others:
        assert equal(other["after_each_update"], alone["after_each_update"])
