"""The documentation site: every page and every public name is on it, and it builds without a warning."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lockstep as ls

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMESPACES = ["data", "extensions", "metrics", "optim", "optim.hooks", "snapshots", "triggers"]
"""The modules below lockstep whose names are public."""
DIRECTIVE = re.compile(r"^\.\. (?:auto|py:)(?:class|exception|function|data):: (lockstep\.\S+)$", re.MULTILINE)


def resolved(path: str) -> object:
    """Return the object of a path.

    >>> resolved("lockstep.optim.hooks.WeightDecay") is ls.optim.hooks.WeightDecay
    True
    """
    module, _, name = path.rpartition(".")
    return vars(importlib.import_module(module))[name]


def documented() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md"))]
    return [name for page in pages for name in DIRECTIVE.findall(page)]


def public_names(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public names of a namespace, and what they stand for.

    Those of a package are what its `__init__` imports as themselves, and those of a module are its classes.
    """
    assert module.__file__
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            yield node.name, vars(module)[node.name]
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            name = alias.asname or ""
            if name and name[0] != "_" and not inspect.ismodule(vars(module)[name]):
                yield name, vars(module)[name]


@pytest.mark.parametrize("namespace", ["", *NAMESPACES])
def test_every_public_name_is_on_a_reference_page(namespace: str) -> None:
    module = importlib.import_module(f"lockstep.{namespace}".rstrip("."))
    objects = {id(resolved(path)) for path in documented()}
    names = dict(public_names(module))
    assert names
    assert [name for name, value in names.items() if id(value) not in objects] == []


def test_no_name_is_documented_twice() -> None:
    names = documented()
    assert sorted(names) == sorted(set(names))


def test_the_public_namespaces_are_those_that_lockstep_lists() -> None:
    text = Path(ls.__file__).read_text(encoding="utf-8")
    (listed,) = re.findall(r"from lockstep import \(\n(.*?)\)", text, re.DOTALL)
    assert sorted(re.findall(r" as (\w+)", listed)) == sorted({name.partition(".")[0] for name in NAMESPACES})


def test_every_page_is_in_the_index_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [entry["page"] for entry in runpy.run_path(str(DOCS / "conf.py"))["entries"](index)]
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if page != "index" and not page.startswith("_build"))


def test_every_example_is_shown() -> None:
    shown = (DOCS / "gallery.md").read_text(encoding="utf-8") + (DOCS / "how-to" / "libraries.md").read_text(
        encoding="utf-8"
    )
    examples = {path.name for path in (DOCS.parent / "examples").rglob("*.py")} - {"compare.py"}
    assert len(examples) > 10
    assert [name for name in sorted(examples) if name not in shown] == []


def test_the_pages_that_the_source_names_exist() -> None:
    source = Path(ls.__file__).parent
    named = {
        page
        for path in source.rglob("*.py")
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [page for page in sorted(named) if not (DOCS.parent / page).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for each in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "sphinxarg"):
        pytest.importorskip(each)
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(tmp_path / "doctrees"), str(DOCS)]
    done = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    start = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert "Get started" in start
    assert 'href="reference/training.html"' in start
    assert (tmp_path / "html" / "searchindex.js").exists()
    trainer = (tmp_path / "html" / "reference" / "training.html").read_text(encoding="utf-8")
    assert 'id="lockstep.Trainer.run"' in trainer
    data = (tmp_path / "html" / "how-to" / "data.html").read_text(encoding="utf-8")
    assert 'href="../reference/data.html#lockstep.BatchIterator"' in data
    commands = (tmp_path / "html" / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "--max-restarts" in commands
