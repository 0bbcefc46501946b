"""A run of several processes: every number is global, and what is printed or written is so once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.programs.training import fail_between_updates, train
from tests.support.ranks import launch_on_ranks

pytest.importorskip("matplotlib", reason="the curve is drawn with it")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_logs_what_one_process_logs(tmp_path: Path, size: int) -> None:
    alone = train(str(tmp_path))
    assert alone["files"] == ["curve.png", "log.jsonl"]
    assert alone["bar"]
    assert alone["asked"] == (39, 39)
    ranks = launch_on_ranks(train, size, str(tmp_path))
    for found in ranks:
        assert found["log"] == alone["log"]
        assert found["end"] == alone["end"]
        assert found["calls"]["best"] == alone["calls"]["best"]
        assert found["calls"]["time"] == ranks[0]["calls"]["time"]
    assert ranks[0]["calls"]["time"]
    assert ranks[0]["printed"] == alone["printed"]
    assert ranks[0]["files"] == alone["files"]
    assert ranks[0]["bar"]
    # Samples of evaluations are loaded once, also where metrics cannot be merged.
    assert sum(found["asked"][0] for found in ranks) == 39
    assert sum(found["asked"][1] for found in ranks) == 39
    for found in ranks[1:]:
        # The first rank of each folder writes the log.
        assert (found["printed"], found["files"], found["bar"]) == ("", ["log.jsonl"], False)


@pytest.mark.usefixtures("spawned_by_forks")
def test_an_extension_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    with pytest.raises(ls.PeerError, match="the disk is full") as raised:
        ls.launch(fail_between_updates, 2, args=(str(tmp_path),))
    assert raised.value.rank == 1


def _run_with_other_extensions(out: str, kind: str) -> str:
    """Add an evaluator, or a snapshot, on rank 0 only, or with a trigger of each rank."""
    data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
    model, loss_fn = nn.Linear(3, 2), ls.supervised(functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data, 6), optimizer, model, devices=["cpu"], num_shards=2, loss_fn=loss_fn
    )
    trainer = ls.Trainer(updater, (2, "update"), out)
    evaluator = ls.extensions.Evaluator(ls.BatchIterator(data, 6, repeat=False), loss_fn=loss_fn)
    if kind == "trigger":
        trainer.extend(evaluator, trigger=(1 + trainer.updater.communicator.rank, "update"))
    elif trainer.is_main:
        trainer.extend(evaluator if kind == "evaluator" else ls.extensions.Snapshot())
    with pytest.raises(ls.DisagreementError) as caught:
        trainer.run()
    updater.finalize()
    return str(caught.value)


EXPECTED = {
    "evaluator": "validation (Evaluator, trigger (1, 'epoch')) on rank 0 and none on rank 1",
    "snapshot": "Snapshot (Snapshot, trigger (1, 'epoch')) on rank 0 and none on rank 1",
    "trigger": "trigger (1, 'update')) on rank 0 and validation (Evaluator, trigger (2, 'update')) on rank 1",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_ranks_with_other_extensions_are_told(kind: str, tmp_path: Path) -> None:
    for text in launch_on_ranks(_run_with_other_extensions, 2, str(tmp_path), kind):
        assert EXPECTED[kind] in text
        assert "not under `if trainer.is_main:`" in text
