"""Of 25 planted dependencies, `verify` finds those that make bits depend on the placement, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.verify import WAYS, Difference
from lockstep.verify.driver import Host, Verifier, hosts

SCRIPT = Path(__file__).parents[1] / "support" / "programs" / "sins.py"
UPDATES = 3
CHOSEN = ("three-devices", "reverse", "workers", "memory", "later")
FOUND = {
    "clock": ("reverse", 1, "shard", "loss"),
    "attribute-counter": ("reverse", 1, "shard", "loss"),
    "dict-counter": ("reverse", 1, "shard", "loss"),
    "global-counter": ("reverse", 1, "shard", "loss"),
    "random": ("reverse", 1, "shard", "loss"),
    "numpy-random": ("reverse", 1, "shard", "loss"),
    "torch-generator": ("reverse", 1, "shard", "loss"),
    "numpy-generator": ("reverse", 1, "shard", "loss"),
    "previous-loss": ("reverse", 1, "shard", "loss"),
    "lru-cache": ("reverse", 1, "shard", "loss"),
    "list-average": ("reverse", 1, "shard", "loss"),
    "forward-hook": ("reverse", 1, "shard", "loss"),
    "thread-id": ("two-devices", 1, "shard", "loss"),
    "set-order": ("hash-seed", 1, "shard", "loss"),
    "unwritten-memory": ("memory", 1, "shard", "loss"),
    "clock-optimizer": ("later", 1, "step", "0.bias"),
    "dataset-writes": ("workers", 2, "data", "batch[0]"),
    "dataset-counts": ("workers", 2, "data", "batch[0]"),
    "dataset-generator": ("workers", 2, "data", "batch[0]"),
}
"""Each harmful dependency with a way that shows it, the first update that differs, and what differs in it."""
HARMLESS = ("input-in-place", "gradient-hook", "set-threads", "read-threads", "shard-size", "unseeded-shuffle")


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Host]]:
    with hosts(WAYS) as found:
        yield found


def difference(started: dict[str, Host], folder: Path, sin: str, *ways: str) -> dict[str, Difference | None]:
    verifier = Verifier(str(SCRIPT), (sin,), UPDATES, str(folder), started, lambda _: None)
    report = verifier.report([way for way in WAYS if way.name in ways])
    assert report.error == ""
    return {row.way.name: row.difference for row in report.rows if not row.skipped}


@pytest.mark.parametrize("sin", FOUND)
def test_a_harmful_dependency_is_found(started: dict[str, Host], tmp_path: Path, sin: str) -> None:
    way, update, what, tensor = FOUND[sin]
    found = difference(started, tmp_path, sin, way)[way]
    assert found is not None
    assert (found.update, found.what, found.tensor) == (update, what, tensor)


@pytest.mark.parametrize("sin", HARMLESS)
def test_a_harmless_one_raises_no_alarm(started: dict[str, Host], tmp_path: Path, sin: str) -> None:
    found = difference(started, tmp_path, sin, *CHOSEN)
    assert found == dict.fromkeys(found)
    assert len(found) == len(CHOSEN)


def test_state_of_a_hook_that_runs_once_is_lost_in_a_resume(started: dict[str, Host], tmp_path: Path) -> None:
    found = difference(started, tmp_path, "gradient-hook", "resume")["resume"]
    assert found is not None
    assert (found.update, found.what) == (2, "step")
