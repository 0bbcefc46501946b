"""A crash at any moment leaves whole snapshots: the newest durable one or a newer one, and never a mixture."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch

from lockstep.digest import tensor_digest
from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.snapshots import Snapshot, SnapshotWriter, load, newest_whole
from lockstep.snapshots.manifest import read_manifest
from lockstep.snapshots.tensor_file import TensorInfo
from tests.support.crashes import MUTANTS, Call, RecordingDisk, Tree, crash_states, lay_out
from tests.support.snapshots import RUN, assert_holds, small_content

SAVES = 3
ROWS = 700
"""Files of several blocks of 4 KB."""
CONTENTS = {update: small_content(update, rows=ROWS) for update in range(1, SAVES + 1)}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Record three saves of which each removes the one before."""
    out = tmp_path_factory.mktemp("recorded")
    disk = RecordingDisk(out)
    with SnapshotWriter(out, run_id=RUN, keep=1, disk=disk) as writer:
        for update, content in CONTENTS.items():
            writer.save(content)
            writer.wait()
            disk.mark(update)
    return acknowledged_early(disk.calls)


def acknowledged_early(calls: list[Call]) -> list[Call]:
    """Move each mark to the moment from which the snapshot must survive: before an older one is touched."""
    found: list[Call] = []
    for call in calls:
        if call[0] == "durable":
            last = max(i for i, each in enumerate(found) if each[0] == "rename" and ".tmp-" in each[1])
            # The fsync of the folder of all snapshots, which makes the rename durable, may be missing in a mutant.
            synced = found[last + 1][0] == "sync_folder"
            found.insert(last + 1 + synced, call)
        else:
            found.append(call)
    return found


def newest_by_latest(out: Path) -> Snapshot | None:
    """Read what a file with the name of the newest snapshot names, as other libraries do."""
    latest = out / "snapshots" / "latest"
    try:
        return load(out / "snapshots" / latest.read_text()) if latest.exists() else None
    except ValueError as error:  # no name at all
        raise SnapshotError(str(error)) from error


Reader = Callable[[Path], "Snapshot | None"]


def problem_of(durable: int, out: Path, read: Reader) -> str | None:
    """Return what is wrong with a state, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SnapshotWarning)
        try:
            snapshot = read(out)
        except (SnapshotError, SnapshotWarning):
            return "refused"
    if snapshot is None:
        return "lost" if durable else None
    if snapshot.update < durable:
        return "an older one"
    assert_holds(snapshot, CONTENTS[snapshot.update])
    return None


def vouches_wrongly(out: Path) -> bool:
    """Return whether a manifest that is whole is beside a file that is there but is not what it says."""
    for manifest in (out / "snapshots").glob("*/snapshot.json"):
        with suppress(SnapshotError):
            for name, entry in read_manifest(manifest.read_bytes()).files.items():
                file = manifest.with_name(name)
                if file.exists() and not is_whole(file.read_bytes(), entry):
                    return True
    return False


def is_whole(data: bytes, entry: Mapping[str, TensorInfo]) -> bool:
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError:
        return False
    return {name: tensor_digest(each) for name, each in tensors.items()} == {
        name: each.digest.sha256 for name, each in entry.items()
    }


def found_problems(
    states: Iterable[tuple[int, Tree]], folder: Path, read: Reader = newest_whole, *, enough: int = 10**9
) -> tuple[int, Counter[str]]:
    """Return how many states were tried, and how many had which problem."""
    count, problems = 0, Counter[str]()
    for durable, tree in states:
        out = folder / "state"
        lay_out(tree, out)
        count += 1
        if (out / "snapshots").is_dir() and vouches_wrongly(out):
            problems["a manifest of torn files"] += 1
        problem = problem_of(durable, out, read)
        if problem:
            problems[problem] += 1
        shutil.rmtree(out)
        if problems.total() >= enough:
            break
    return count, problems


def test_some_states_after_a_crash(calls: list[Call], memory_path: Path) -> None:
    count, problems = found_problems(crash_states(calls, limit=60), memory_path)
    assert count > 350
    assert not problems


@pytest.mark.slow
def test_all_states_after_a_crash(calls: list[Call], memory_path: Path) -> None:
    count, problems = found_problems(crash_states(calls, limit=10_000), memory_path)
    print(f"{count} states, {problems.total()} problems")  # noqa: T201 - for the table
    assert count >= 10_000
    assert not problems


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_protocol_is_caught(mutant: str, calls: list[Call], memory_path: Path) -> None:
    read = newest_by_latest if mutant == "latest file" else newest_whole
    _, problems = found_problems(crash_states(MUTANTS[mutant](calls), limit=60), memory_path, read, enough=1)
    assert problems


def test_a_run_goes_on_after_a_crash(calls: list[Call], memory_path: Path) -> None:
    for number, (_, tree) in enumerate(crash_states(calls, limit=2)):
        out = memory_path / str(number)
        lay_out(tree, out)
        content = small_content(9, rows=ROWS)
        with SnapshotWriter(out, run_id=RUN, keep=1) as writer:
            writer.save(content)
        snapshot = newest_whole(out)
        assert snapshot is not None
        assert_holds(snapshot, content)
        assert sorted(path.name for path in (out / "snapshots").iterdir()) == [".lock", "00000009"]
