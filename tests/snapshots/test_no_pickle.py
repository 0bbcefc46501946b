"""No snapshot is pickled or unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import lockstep as ls
from lockstep.snapshots import compare_runs, export_hf, load, newest_whole, verify
from tests.support.audit import Audit
from tests.support.snapshots import small_content, write


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let calls of pickle by these names fail, and those by which PyTorch saves and loads."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was called")

    for module, name in [(torch, "load"), (torch, "save"), *((pickle, each) for each in names)]:
        monkeypatch.setattr(module, name, forbidden)


def test_saving_and_loading_unpickle_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "load", "loads", "dump", "dumps")
    with Audit() as audit:
        folder, _ = write(tmp_path, small_content(1), small_content(2))
        verify(folder)
        load(folder).state()
        newest_whole(tmp_path)
        safetensors.torch.load_file(folder / "model.safetensors")
    assert audit.unpickled == []
    assert audit.written_outside(tmp_path) == []


def trainer(out: Path, updates: int) -> ls.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    samples = torch.utils.data.TensorDataset(torch.ones(12, 4), torch.ones(12, 2))
    batches = ls.BatchIterator(samples, 4, shuffle=True)
    loss = ls.supervised(torch.nn.functional.mse_loss)
    made = ls.Trainer(
        ls.ParallelUpdater(batches, optimizer, model, devices=1, loss_fn=loss), (updates, "update"), out=out
    )
    made.extend(ls.extensions.LogReport(trigger=(1, "update")))
    made.extend(ls.extensions.Snapshot(), trigger=(2, "update"))
    return made


def test_a_run_its_resumption_its_comparison_and_its_export_unpickle_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run may compare states of random generators by what `dumps` returns, which is written nowhere.
    forbid(monkeypatch, "load", "loads", "dump")
    out = tmp_path / "run"
    trainer(tmp_path / "first", 1).run()  # PyTorch creates a folder when it is first needed
    with Audit() as audit:
        trainer(out, 3).run()
        resumed = trainer(out, 5)
        resumed.run(resume="auto")
        compare_runs(out, out)
        export_hf(out, tmp_path / "hf")
    assert resumed.updater.iteration == 5
    assert safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert audit.unpickled == []
    assert audit.written_outside(tmp_path) == []


def test_the_audit_sees_what_is_unpickled() -> None:
    with Audit() as audit:
        pickle.loads(pickle.dumps(Path))  # noqa: S301
    assert audit.unpickled
