"""Of 25 planted dependencies, `verify` finds those that make bits depend on the placement, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.verify import WAYS, Row
from lockstep.verify.causes import CURES
from lockstep.verify.driver import Host, Verifier, hosts
from lockstep.verify.experiments import kind_of

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


def test_each_run_draws_anew_what_the_script_does_not_seed(started: dict[str, Host], tmp_path: Path) -> None:
    assert rows(started, tmp_path, "random", "later")["later"].difference is not None


BATCH_LOSS = """
import torch
import lockstep as ls
from torch.nn import functional

class Encoder(torch.nn.Sequential):
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.1)

def contrastive(model, x):
    rows = functional.normalize(model(x))
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(x)))

torch.manual_seed(0)
encoder = Encoder(torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8)).eval()
data = list(torch.randn(32, 4))
batches, tests = ls.BatchIterator(data, 16, shuffle=True), ls.BatchIterator(data, 16, repeat=False)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
updater = ls.ParallelUpdater(batches, optimizer, encoder, devices=1, num_shards=4, loss_fn=contrastive)
trainer = ls.Trainer(updater, until=(5, "iteration"))
trainer.extend(ls.extensions.Evaluator(tests, loss_fn=contrastive), trigger=(1, "iteration"))
trainer.run()
"""


def test_what_is_equal_and_wrong_is_named(started: dict[str, Host], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BATCH_LOSS, encoding="utf-8")
    verifier = Verifier(str(script), (), UPDATES, str(tmp_path), started, lambda _: None)
    report = verifier.report([way for way in WAYS if way.one_shard])
    (row,) = report.rows
    assert row.difference is not None
    assert row.cause is not None
    assert (row.status, row.difference.what, report.passed) == ("differs", "one shard", False)
    assert (row.cause.kind, row.cause.line) == ("mean", "train.py:10 in contrastive")
    evaluation, mode, normalized = report.findings
    assert evaluation.startswith("An evaluation computes as in training: dropout at train.py:8 in forward")
    assert "switched to training mode" in mode
    assert normalized.startswith("1 layers (1) normalize each shard by its own statistics")


@pytest.mark.parametrize(("follows", "kind"), [(True, "kernels"), (False, "state")])
def test_a_kernel_without_an_order_is_told_from_state_that_is_kept(*, follows: bool, kind: str) -> None:
    calls: list[int] = []

    def once(**_: Any) -> int:
        calls.append(0)
        return 0 if follows and torch.are_deterministic_algorithms_enabled() else len(calls)

    assert kind_of(once) == kind
    assert kind in CURES
    assert not torch.are_deterministic_algorithms_enabled()
