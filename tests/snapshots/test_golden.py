"""The present format and the one before are read: folders that this version and an older one have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.snapshots import load, write_beside
from tests.support.snapshots import assert_holds, small_content

GOLDEN = Path(__file__).parent / "golden"
DIGESTS = dict.fromkeys((1, 2), "b006132a3f89eccabc40f4217141c123d1b9fe3a5f5556a5ba42894797d2e975")
"""By format, the digest of the training state of `small_content` at update 3."""


@pytest.mark.parametrize("number", DIGESTS)
def test_a_folder_of_each_format_is_read(number: int) -> None:
    snapshot = load(GOLDEN / f"format-{number}")
    assert (snapshot.manifest.format, snapshot.digest) == (number, DIGESTS[number])
    assert_holds(snapshot, small_content(3))
    assert snapshot.recipe == small_content(3).recipe
    assert snapshot.surroundings()["log"] == [{"loss": 1 / 3}]
    assert snapshot.manifest.metrics == {"accuracy": 0.5}


def test_the_present_format_has_a_folder_whose_files_are_still_written(tmp_path: Path) -> None:
    written = write_beside(tmp_path, small_content(3), reasons=["test"])
    golden = GOLDEN / f"format-{load(written).manifest.format}"
    for name in ("model.safetensors", "state.safetensors"):
        assert (written / name).read_bytes() == (golden / name).read_bytes()
    # All of the manifest but the version of the writer, and the seal that depends on it.
    documents = [json.loads((each / "snapshot.json").read_bytes()) for each in (written, golden)]
    assert [document.pop(key) != "" for document in documents for key in ("writer", "sha256")]
    assert json.dumps(documents[0]) == json.dumps(documents[1])
