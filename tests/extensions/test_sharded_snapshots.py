"""Snapshots of optimizers that ranks share out: the files of whole ones, and none of a state that is lost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep import Communicator, Trainer
from lockstep.errors import PeerError, SnapshotWarning
from lockstep.extensions import Snapshot
from tests.support.programs.sharding import RUNS, updater_of
from tests.support.ranks import run_on_ranks


def test_files_are_those_of_whole_optimizers(tmp_path: Path) -> None:
    train(ls.LocalCommunicator(), str(tmp_path / "whole"), shard=False)
    run_on_ranks(train, 2, str(tmp_path / "shared"))
    names = [path.name for path in sorted((tmp_path / "whole" / "snapshots").iterdir()) if path.is_dir()]
    assert len(names) == 3
    for name in names:
        whole, shared = (tmp_path / each / "snapshots" / name for each in ("whole", "shared"))
        tensors = [path for path in whole.iterdir() if path.suffix != ".json"]
        assert tensors
        for path in tensors:
            assert (shared / path.name).read_bytes() == path.read_bytes(), path.name


def train(communicator: Communicator, out: str, *, shard: bool = True, fails: bool = False) -> list[str]:
    """Train five updates with a snapshot every second one, and return the warnings."""
    updater = updater_of(RUNS["AdamW, masters"], 1, shard=shard, communicator=communicator)
    trainer = Trainer(updater, until=(5, "iteration"), out=out)
    trainer.extend(Snapshot(digest_every=1), trigger=(2, "iteration"))
    if fails and communicator.rank == 1:

        def fail(*_: Any) -> None:
            if updater.iteration == 3:
                raise RuntimeError("rank 1 is lost")

        updater.get_optimizer("main").register_step_pre_hook(fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SnapshotWarning)
        if fails:
            with pytest.raises((RuntimeError, PeerError)):
                trainer.run()
        else:
            trainer.run()
    return [str(each.message) for each in caught if issubclass(each.category, SnapshotWarning)]


def test_no_snapshot_is_written_of_a_state_that_is_partly_lost(tmp_path: Path) -> None:
    survivor, _ = run_on_ranks(_lost, 2, str(tmp_path))
    (message,) = [each for each in survivor if "No snapshot of update 3" in each]
    assert "from its newest snapshot, that of update 2, and repeats 1 updates" in message
    assert "`shard_optimizer=False`" in message
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir() if path.is_dir()) == ["00000002"]


def _lost(communicator: Communicator, out: str) -> list[str]:
    return train(communicator, out, fails=True)
