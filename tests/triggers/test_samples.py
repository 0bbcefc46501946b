"""Triggers and ends of runs that count samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.resuming import Noted


def trainer(batches: ls.BatchIterator | ls.IterableBatches, out: Path, end: int = 60) -> tuple[ls.Trainer, Noted]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ls.StandardUpdater(batches, optimizer, model, loss_fn=lambda net, x: net(x).mean())
    made, noted = ls.Trainer(updater, (end, "sample"), out=out), Noted("noted")
    made.extend(noted, trigger=(20, "sample"))
    return made, noted


@pytest.mark.parametrize(
    ("last_batch", "calls", "passed"),
    [("short", [3, 6, 9], 60), ("wrap", [3, 5, 8], 64), ("drop", [2, 4, 6], 60)],
)
def test_samples_are_counted_over_epochs(last_batch: str, calls: list[int], passed: int, tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 2))
    made, noted = trainer(ls.BatchIterator(data, 8, last_batch=last_batch), tmp_path)  # type: ignore[arg-type]
    made.run()
    # Dropped samples count as passed: each epoch of 20 ends with its second batch of 8.
    assert made.updater.samples_passed == passed
    assert noted.calls == calls


def test_an_iterator_that_counts_batches_is_refused(tmp_path: Path) -> None:
    made, _ = trainer(ls.IterableBatches([torch.zeros(2, 2)]), tmp_path)
    assert made.updater.samples_passed is None
    with pytest.raises(ValueError, match="`unit` must not be 'sample' for an iterator that counts batches, got a Iter"):
        made.run()
