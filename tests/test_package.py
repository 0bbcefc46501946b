"""The wheel and the sdist hold what is needed, and work in a fresh environment without the checkout."""

from __future__ import annotations

import ast
import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    assert required == {"numpy", "safetensors", "torch", "tqdm"}


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def link_required(wheel: Path, packages: Path) -> None:
    """Add to an environment what a wheel requires, and what that requires, from this one; and nothing else."""
    (name,) = [each for each in zipfile.ZipFile(wheel).namelist() if each.endswith("/METADATA")]
    metadata_of_wheel = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    waiting = list(metadata_of_wheel.get_all("Requires-Dist", []))
    found = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        waiting += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))


STARTS = [
    ["python", "train.py"],
    ["lockstep", "run", "-n", "2", "train.py"],
    ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
]


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    commands = environment / ("Scripts" if os.name == "nt" else "bin")
    python = commands / "python"
    packages = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (wheel,) = built.glob("*.whl")
    link_required(wheel, Path(packages))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    program = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```\n")[0]
    program += "    print(ls.__file__)\n"
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    digests = set()
    for command, *arguments in STARTS:
        start = [commands / command, *arguments]
        done = subprocess.run(start, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True)
        digests |= set(re.findall("^[0-9a-f]{64}$", done.stdout, re.MULTILINE))
        assert "Warning" not in done.stderr
        assert Path(done.stdout.splitlines()[-1]).is_relative_to(packages)
    assert len(digests) == 1


PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_pin_for_each_python(python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert sorted(here) == sorted({pin.name for pin in pins})


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 9, 18), (3, 15, 0)])
def test_another_python_is_told_at_once_which_ones_are_needed(version: tuple[int, int, int]) -> None:
    program = (ROOT / "dev.py").read_text(encoding="utf-8")
    ast.parse(program, feature_version=version[:2])
    code = f"import sys, venv; sys.version_info = {(*version, 'final', 0)}; exec(sys.argv.pop(1))"
    done = subprocess.run(
        [sys.executable, "-c", code, program, "digits"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert f"got {'.'.join(map(str, version))};" in sentence
    assert all(python in sentence for python in PYTHONS)
