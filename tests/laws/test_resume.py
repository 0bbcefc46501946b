"""A run that is stopped after any update and resumed anywhere ends with the bits of one that was not stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.resuming import PLACES, RECIPES, UPDATES, Place, digests, log_lines, run_at, tensor_files

NAMES = list(RECIPES)
SAMPLE_UPDATES = 14
"""Of the runs of the sample: beyond the first epoch of each recipe."""
SAMPLE = [
    (NAMES[index % len(NAMES)], 1 + (5 * index + 3) % (SAMPLE_UPDATES - 1), index) for index in range(len(PLACES))
]
"""A recipe and an update for each place."""


class Reference:
    """Runs that were not stopped, with a snapshot after each update."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, int], dict[str, object]] = {}

    def run(self, name: str, updates: int) -> tuple[Path, dict[str, object]]:
        out = self._folder / f"{name}-{updates}"
        if (name, updates) not in self._found:
            # Another place for each recipe, so that snapshots of every kind of place are resumed from.
            self._found[name, updates] = run_at(PLACES[2 * NAMES.index(name) % len(PLACES)], name, out, updates)
        return out, self._found[name, updates]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("uninterrupted"))


def check_resumed(reference: Reference, name: str, stopped: int, place: Place, *, out: Path, updates: int) -> None:
    """Resume a run at a place, and compare everything that it leaves with the run that was not stopped."""
    whole, expected = reference.run(name, updates)
    folder = f"snapshots/{stopped:08d}"
    shutil.copytree(whole / folder, out / folder)
    # The state has the position in the log, and the file the entries; later ones are cut off.
    shutil.copy(whole / "log.jsonl", out)
    found = run_at(place, name, out, updates, resume="auto")
    assert found == expected
    assert log_lines(out) == log_lines(whole)
    later = range(stopped + 1, updates + 1)
    assert {update: digests(out)[update] for update in later} == {update: digests(whole)[update] for update in later}
    files = tensor_files(whole)
    written = tensor_files(out)
    assert len({Path(each).parent for each in written}) == 1 + len(later)
    assert {path: files[path] for path in written} == written


@pytest.mark.parametrize(
    ("name", "stopped", "place"),
    [each if index % 5 == 0 else pytest.param(*each, marks=pytest.mark.slow) for index, each in enumerate(SAMPLE)],
    ids=str,
)
def test_a_sample_of_stopped_runs(reference: Reference, name: str, stopped: int, place: int, tmp_path: Path) -> None:
    check_resumed(reference, name, stopped, PLACES[place], out=tmp_path, updates=SAMPLE_UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", range(1, UPDATES))
@pytest.mark.parametrize("name", NAMES)
def test_every_update(reference: Reference, name: str, stopped: int, tmp_path: Path) -> None:
    # Rotated by the recipe, so that every place meets every recipe, at other updates.
    place = PLACES[(stopped + NAMES.index(name)) % len(PLACES)]
    check_resumed(reference, name, stopped, place, out=tmp_path, updates=UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_stopped_at_its_end(reference: Reference, name: str, tmp_path: Path) -> None:
    whole, expected = reference.run(name, UPDATES)
    folder = f"snapshots/{UPDATES:08d}"
    shutil.copytree(whole / folder, tmp_path / folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_at(PLACES[NAMES.index(name)], name, tmp_path, UPDATES, resume="auto") == expected
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_every_place_meets_every_recipe() -> None:
    met = {(name, (stopped + NAMES.index(name)) % len(PLACES)) for name in NAMES for stopped in range(1, UPDATES)}
    assert len(met) == len(NAMES) * len(PLACES)


def test_the_runs_meet_what_they_are_for(reference: Reference) -> None:
    _, found = reference.run("fp16", SAMPLE_UPDATES)
    assert found["applied"] == SAMPLE_UPDATES
    # It grows between overflows.
    assert found["loss scale"] < 2.0**20
