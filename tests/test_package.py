"""The wheel and the sdist hold what is needed, and work in a fresh environment without the checkout."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from lockstep import __version__

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it; return their folder."""
    for each in ("build", "hatchling"):
        pytest.importorskip(each)
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation nothing is downloaded; `build` makes the wheel from the sdist, not from the checkout.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert "lockstep/py.typed" in files
    assert {name for name in names if not name.startswith("lockstep_torch-")} == files


def test_the_sdist_holds_the_project(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "dev.py", "docs/index.md", "tests/conftest.py"]
    assert set(wanted) <= names
    assert [name for name in names if name.startswith((".venv", "runs/", "docs/_build"))] == []


def test_the_metadata_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    text = zipfile.ZipFile(wheel).read(f"lockstep_torch-{__version__}.dist-info/METADATA").decode()
    found = email.message_from_string(text)
    assert (found["Name"], found["Version"]) == ("lockstep-torch", __version__)
    assert found["Summary"]
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.10"
    assert found["Author"] == "The lockstep developers"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith("# lockstep")
    required = {re.split(r"[>=;\[ ]", each)[0] for each in found.get_all("Requires-Dist", []) if "extra ==" not in each}
    assert required == {"safetensors", "torch", "tqdm"}


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    packages = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    # Torch is found where it is already; files that lead to the checkout are not read in a folder named like this.
    Path(packages, "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]), encoding="utf-8")
    program = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```\n")[0]
    program += "print(ls.__file__)\n"
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "train.py"], cwd=tmp_path, env=variables, check=True, capture_output=True, text=True
    )
    digest, file = done.stdout.splitlines()[-2:]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert Path(file).is_relative_to(packages)
    command = environment / ("Scripts" if os.name == "nt" else "bin") / "lockstep"
    version = subprocess.run(
        [str(command), "--version"], env=variables, check=True, capture_output=True, text=True
    ).stdout
    assert version.strip() == f"lockstep {__version__}"
