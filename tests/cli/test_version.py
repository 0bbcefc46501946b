"""The command says its version, and the distribution has the name that its extras and pages give it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.cli import main
from tests.support import zygote

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lockstep {ls.__version__}\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "lockstep", "--version"]
    done = zygote.run(command, check=True)
    assert done.stdout == f"lockstep {ls.__version__}\n"


def test_nobody_is_sent_to_the_other_project_of_this_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "lockstep-torch"
    assert set(project["scripts"]) == {"lockstep"}
    needed = [each for extra in project["optional-dependencies"].values() for each in extra]
    assert [each for each in needed if each.startswith("lockstep")] == [
        "lockstep-torch[plot]",
        "lockstep-torch[docs,examples]",
    ]
    places = [ROOT / "README.md", ROOT / "dev.py", ROOT / "CONTRIBUTING.md"]
    places += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py")]
    for place in places:
        text = place.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^\n#]*[ '\"]lockstep(?!-torch)\b|\blockstep\[\w+\]", text), place
