"""Watching a run makes it wait for no device before somebody reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.extensions import LogReport
from lockstep.metrics import Accuracy, Average, Mean
from lockstep.trainer import Trainer
from tests.support.plain_updaters import CountingUpdater

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is there"),
]


@pytest.fixture
def _waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_waiting_is_an_error")
def test_updating_does_not_wait_and_computing_does() -> None:
    average, accuracy = Average(), Accuracy(top_k=2, ignore_index=1)
    output, target = torch.randn(8, 4, device="cuda"), torch.ones(8, dtype=torch.long, device="cuda")
    for _ in range(10):
        average.update(output.sum(), weight=output.new_ones(()))
        accuracy.update(output, target)
    for compute in (average.compute, accuracy.compute):
        with pytest.raises(RuntimeError, match="synchronizing"):
            compute()


def test_a_log_waits_once_an_interval(tmp_path: Path) -> None:
    loss = torch.tensor(2.0, device="cuda")
    mean = Mean(loss * 3, torch.tensor(3, device="cuda"))
    trainer = Trainer(CountingUpdater(20, [mean] * 20), (1, "epoch"), tmp_path)
    report = LogReport(trigger=(10, "iteration"))

    trainer.extend(report)
    trainer.extend(lambda _: torch.cuda.set_sync_debug_mode("error"), priority=1000)
    trainer.extend(lambda _: torch.cuda.set_sync_debug_mode("default"), priority=999, trigger=(10, "iteration"))
    try:
        trainer.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [entry["main/loss"] for entry in report.log] == [2.0, 2.0]


def test_a_state_read_from_a_device_goes_on_in_memory() -> None:
    first, second = Average(), Average()
    values = torch.rand(100, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for value in values:
        first.update(value)
    second.load_state_dict(first.state_dict())
    for value in values.cpu():
        first.update(value)
        second.update(value)
    assert first.compute() == second.compute()
