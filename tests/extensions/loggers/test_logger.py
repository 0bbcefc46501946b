"""What all loggers have in common: packages that are absent, and several ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.extensions import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
from tests.extensions.loggers.runs import whole_run
from tests.support.ranks import launch_on_ranks


@pytest.mark.parametrize(
    ("logger", "package"), [(TensorBoardLogger, "tensorboard"), (WandbLogger, "wandb"), (MLflowLogger, "mlflow")]
)
def test_a_package_that_is_absent_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, logger: Any, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=rf"{logger.__name__} requires {package}. .*'lockstep-torch\[{package}\]'"):
        logger()


def log_on_a_rank(out: str) -> None:
    whole_run(Path(out), CSVLogger(f"{ls.find_communicator().rank}.csv"))


def test_rank_0_writes_for_all_what_a_process_alone_writes(tmp_path: Path) -> None:
    log_on_a_rank(str(tmp_path / "alone"))
    launch_on_ranks(log_on_a_rank, 2, str(tmp_path / "ranks"))
    assert [path.name for path in (tmp_path / "ranks").glob("*.csv")] == ["0.csv"]
    assert (tmp_path / "ranks/0.csv").read_bytes() == (tmp_path / "alone/0.csv").read_bytes()
