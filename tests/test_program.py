"""Snapshots and logs say which program ran, and a run that resumes under another one says what differs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lockstep as ls
from lockstep.errors import SnapshotWarning
from lockstep.program import describe_program, describe_script
from tests.support.small_updater import updater_of

SCRIPT = "print('trained')\n"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in a repository, which has been committed."""
    path = tmp_path / "code" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return path


def test_the_script_and_the_commit_of_its_folder(tmp_path: Path, script: Path) -> None:
    found = describe_script(str(script))
    assert found == {
        "script": hashlib.sha256(SCRIPT.encode()).hexdigest(),
        "git commit": git(tmp_path, "rev-parse", "HEAD").strip(),
        "uncommitted changes": "none",
    }


def test_what_a_run_writes_is_no_change_of_its_code_and_an_edit_is(tmp_path: Path, script: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}")
    assert describe_script(str(script))["uncommitted changes"] == "none"
    script.write_text(SCRIPT * 2)
    assert describe_script(str(script))["uncommitted changes"] == "none"  # the code that runs was read at its start
    assert (
        describe_script.__wrapped__(str(script))["uncommitted changes"]
        == hashlib.sha256(git(tmp_path, "diff", "HEAD", "--binary").encode()).hexdigest()
    )


@pytest.mark.parametrize("how", ["no git", "no commit", "no repository"])
def test_without_a_commit_the_script_is_known(
    tmp_path: Path, script: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif how == "no commit":
        git(tmp_path, "update-ref", "-d", "HEAD")
    else:
        (tmp_path / ".git").rename(tmp_path / "git")
    assert set(describe_script(str(script))) == {"script"}


def test_a_program_without_a_script_has_versions_alone(tmp_path: Path) -> None:
    assert describe_script(str(tmp_path / "<stdin>")) == {}
    found = describe_program()
    assert found["package torch"] == version("torch")
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "package pytest" in found
    assert "package mypy" not in found, "it is installed, but no module of it is imported"


def resumed(tmp_path: Path, saved: Any) -> list[warnings.WarningMessage]:
    """Resume from a snapshot that says `saved` of its program, and return the warnings."""
    with updater_of(nn.Linear(1, 1)) as updater:
        updater.update()
        ls.snapshots.save(updater, tmp_path / "snapshot")
        digest = ls.digest(updater.state_dict())
    about = tmp_path / "snapshot" / "about.json"
    written = json.loads(about.read_text())
    assert written["program"] == describe_program()
    about.write_text(saved if isinstance(saved, str) else json.dumps({"program": {**written["program"], **saved}}))
    with updater_of(nn.Linear(1, 1)) as updater, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ls.snapshots.restore(updater, tmp_path / "snapshot")
        assert ls.digest(updater.state_dict()) == digest
    return caught


def test_a_resume_under_other_code_warns_and_continues(tmp_path: Path) -> None:
    [warned] = resumed(tmp_path, {"package torch": "1.4.0", "git commit": "abc", "package chainer": "7.8.1"})
    assert warned.category is ls.DeterminismWarning
    text = str(warned.message)
    assert f"package torch is {version('torch')!r} here and '1.4.0' in the snapshot" in text
    assert "chainer" not in text, "only the snapshot's program had imported it, or not yet"


def test_a_resume_under_the_same_code_says_nothing(tmp_path: Path) -> None:
    assert resumed(tmp_path, {}) == []


@pytest.mark.parametrize("damaged", ["{", "[]", '{"program": 1}'])
def test_a_description_that_cannot_be_read_is_no_reason_to_refuse(tmp_path: Path, damaged: str) -> None:
    [warned] = resumed(tmp_path, damaged)
    assert warned.category is SnapshotWarning
    assert "does not say which program wrote the snapshot" in str(warned.message)
