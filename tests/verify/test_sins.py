"""Of 25 planted dependencies, `verify` finds those that make bits depend on the placement, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.verify import WAYS, Row
from lockstep.verify.driver import Host, Verifier, hosts

SCRIPT = Path(__file__).parents[1] / "support" / "programs" / "sins.py"
UPDATES = 3
CHOSEN = ("three-devices", "reverse", "workers", "memory", "later")
FOUND = {
    "clock": ("reverse", 1, "shard", "loss", "clock", "aten.mul.Tensor", "in loss_of"),
    "attribute-counter": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "dict-counter": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "global-counter": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "random": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "numpy-random": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "torch-generator": ("reverse", 1, "shard", "loss", "state", "aten.rand.generator", "in <lambda>"),
    "numpy-generator": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "previous-loss": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "lru-cache": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in loss_of"),
    "list-average": ("reverse", 1, "shard", "loss", "state", "aten.mul.Tensor", "in average"),
    "forward-hook": ("reverse", 1, "shard", "loss", "state", "aten.add.Tensor", "in count_calls"),
    "thread-id": ("two-devices", 1, "shard", "loss", "thread", "aten.mul.Tensor", "in loss_of"),
    "set-order": ("hash-seed", 1, "shard", "loss", "process", "aten.mul.Tensor", "in loss_of"),
    "unwritten-memory": ("memory", 1, "shard", "loss", "memory", "aten.empty.memory_format", "in scratch"),
    "clock-optimizer": ("later", 1, "step", "0.bias", "clock", "aten.add_.Tensor", "in step"),
    "dataset-writes": ("workers", 2, "data", "batch[0]", "data", "", ""),
    "dataset-counts": ("workers", 2, "data", "batch[0]", "data", "", ""),
    "dataset-generator": ("workers", 2, "data", "batch[0]", "data", "", ""),
}
"""Each harmful dependency with a way that shows it, the first update that differs, what differs in it, the kind of the
cause, the operator, and the function of its line."""
QUICK = {"global-counter", "clock", "thread-id", "set-order", "unwritten-memory", "clock-optimizer", "dataset-counts"}
"""One of each kind; the others are slow."""
HARMLESS = ("input-in-place", "gradient-hook", "set-threads", "read-threads", "shard-size", "unseeded-shuffle")


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Host]]:
    with hosts(WAYS) as found:
        yield found


def rows(started: dict[str, Host], folder: Path, sin: str, *ways: str) -> dict[str, Row]:
    verifier = Verifier(str(SCRIPT), (sin,), UPDATES, str(folder), started, lambda _: None)
    report = verifier.report([way for way in WAYS if way.name in ways])
    assert report.error == ""
    return {row.way.name: row for row in report.rows}


@pytest.mark.parametrize("sin", [pytest.param(sin, marks=[] if sin in QUICK else pytest.mark.slow) for sin in FOUND])
def test_a_harmful_dependency_is_found(started: dict[str, Host], tmp_path: Path, sin: str) -> None:
    way, update, what, tensor, kind, operator, line = FOUND[sin]
    row = rows(started, tmp_path, sin, way)[way]
    assert row.difference is not None
    assert row.cause is not None
    assert (row.difference.update, row.difference.what, row.difference.tensor) == (update, what, tensor)
    assert (row.cause.kind, row.cause.operator) == (kind, operator)
    assert line in row.cause.line


@pytest.mark.parametrize(
    "sin", [pytest.param(sin, marks=[] if sin == "input-in-place" else pytest.mark.slow) for sin in HARMLESS]
)
def test_a_harmless_one_raises_no_alarm(started: dict[str, Host], tmp_path: Path, sin: str) -> None:
    found = rows(started, tmp_path, sin, *CHOSEN)
    assert [row.status for row in found.values()] == ["equal"] * len(CHOSEN)


def test_state_of_a_hook_that_runs_once_is_lost_in_a_resume(started: dict[str, Host], tmp_path: Path) -> None:
    row = rows(started, tmp_path, "gradient-hook", "resume")["resume"]
    assert row.difference is not None
    assert row.cause is not None
    assert (row.difference.update, row.difference.what, row.cause.kind) == (2, "step", "resume")
