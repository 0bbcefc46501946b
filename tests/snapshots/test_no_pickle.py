"""No snapshot is pickled or unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lockstep.snapshots import load, newest_whole, verify
from tests.support.audit import Audit
from tests.support.snapshots import small_content, write


def test_saving_and_loading_unpickle_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was called")

    for module, name in [
        (torch, "load"),
        (torch, "save"),
        *((pickle, each) for each in ("load", "loads", "dump", "dumps")),
    ]:
        monkeypatch.setattr(module, name, forbidden)
    with Audit() as audit:
        folder, _ = write(tmp_path, small_content(1), small_content(2))
        verify(folder)
        load(folder).state()
        newest_whole(tmp_path)
        safetensors.torch.load_file(folder / "model.safetensors")
    assert audit.unpickled == []
    assert audit.written_outside(tmp_path) == []


def test_the_audit_sees_what_is_unpickled() -> None:
    with Audit() as audit:
        pickle.loads(pickle.dumps(Path))  # noqa: S301
    assert audit.unpickled
