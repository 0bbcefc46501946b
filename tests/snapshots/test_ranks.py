"""Ranks resume from one snapshot, also if only some of them have it, and know who writes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.snapshots import first_rank_in_folder
from tests.support.rank_pool import RankError
from tests.support.ranks import run_on_ranks
from tests.support.resuming import Place, digests, run_at, tensor_files, trainer


def run_in_folders(
    communicator: ls.Communicator, folders: list[str], updates: int, *, per_machine: bool
) -> tuple[int, str]:
    """Resume with a folder for each rank, and return where the run began and its end."""
    place = Place(1, communicator.size, 0)
    made = trainer("adamw", place, communicator, out=Path(folders[communicator.rank]), updates=updates)
    snapshot = made.get_extension("Snapshot")
    assert isinstance(snapshot, ls.extensions.Snapshot)
    snapshot.per_machine = per_machine
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(resume="auto")
    told = [str(each.message) for each in caught if "do not share the folder" in str(each.message)]
    assert len(told) == (communicator.rank == 0 and not per_machine and len(set(folders)) > 1)
    start = 0 if made.resumption is None else made.resumption.update
    return start, ls.digest(made.updater.state_dict())


def resume_in_folders(communicator: ls.Communicator, folders: list[str]) -> tuple[int, str]:
    return run_in_folders(communicator, folders, 8, per_machine=False)


def resume_on_machines(communicator: ls.Communicator, folders: list[str]) -> tuple[int, str]:
    return run_in_folders(communicator, folders, 8, per_machine=True)


@pytest.mark.parametrize("owner", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_rank_that_has_a_snapshot_sends_it(tmp_path: Path, owner: int) -> None:
    whole = tmp_path / "whole"
    run_at(Place(1, 1, 0), "adamw", whole, 8)
    folders = [tmp_path / "first", tmp_path / "second"]
    for rank, update in ((owner, 5), (1 - owner, 3)):  # the other rank has an older one
        name = f"snapshots/{update:08d}"
        shutil.copytree(whole / name, folders[rank] / name)
    found = run_on_ranks(resume_in_folders, 2, [str(each) for each in folders])
    assert found[0] == found[1]
    assert found[0][0] == 5
    expected = digests(whole)
    assert {update: digests(folders[0])[update] for update in (6, 7, 8)} == {each: expected[each] for each in (6, 7, 8)}
    assert not (folders[1] / "snapshots/00000008").exists()


def test_each_machine_writes_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second", tmp_path / "second"]
    found = run_on_ranks(resume_on_machines, 3, [str(each) for each in folders])
    assert [start for start, _ in found] == [0, 0, 0]
    assert tensor_files(folders[0]) == tensor_files(folders[1])
    assert len(tensor_files(folders[0])) == 16


def leaders(communicator: ls.Communicator, folders: list[str]) -> list[int]:
    return first_rank_in_folder(communicator, Path(folders[communicator.rank]))


def test_the_ranks_of_a_folder_find_each_other(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    found = run_on_ranks(leaders, 3, [str(second), str(first), str(second)])
    assert found == [[0, 1, 0]] * 3
    assert [*first.iterdir(), *second.iterdir()] == []


def test_no_whole_snapshot_on_any_rank_is_an_error_on_all(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_at(Place(1, 1, 0), "adamw", whole, 2)
    for each in (whole / "snapshots").glob("*/model.safetensors"):
        each.write_bytes(b"")
    with pytest.raises(RankError) as raised:
        run_on_ranks(resume_in_folders, 2, [str(whole), str(tmp_path / "other")])
    assert str(raised.value).count("lockstep.errors.SnapshotError: Rank 0: No snapshot in") == 2


def save_on_all(communicator: ls.Communicator, path: str) -> str:
    place = Place(1, communicator.size, 0)
    made = trainer("mlp", place, communicator, out=Path(path) / "out", updates=1).updater
    made.update()
    ls.snapshots.save(made, Path(path) / "saved")
    again = trainer("mlp", place, communicator, out=Path(path) / "out", updates=1).updater
    ls.snapshots.restore(again, Path(path) / "saved")
    assert again.iteration == 1
    again.update()
    made.update()
    assert ls.digest(made.state_dict()) == ls.digest(again.state_dict())
    try:
        ls.snapshots.save(made, Path(path) / "saved")
    except (FileExistsError, ls.SnapshotError) as error:
        return str(error)
    return ""


def test_saving_without_a_trainer(tmp_path: Path) -> None:
    own, other = run_on_ranks(save_on_all, 2, str(tmp_path))
    assert own.startswith("`path` must not exist")
    assert own.endswith(
        "Choose another path, remove it, or continue from it by lockstep.snapshots.restore(updater, path)."
    )
    assert other.startswith("Rank 0 could not save a snapshot: FileExistsError: `path` must not exist")
