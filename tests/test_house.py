"""The structure can be taken in: imports that stop at a part's face, tests for each module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lockstep as ls

SOURCE = Path(ls.__file__).parent
TESTS = Path(__file__).parent


def package_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCE).parent.parts


def imported_modules(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the modules of lockstep that some code imports from, as their parts below lockstep."""
    for node in ast.walk(ast.parse(text)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            first, *rest = name.split(".")
            if first == "lockstep":
                yield tuple(rest)


def past_the_face(package: tuple[str, ...], module: tuple[str, ...]) -> bool:
    """Tell whether an import reaches into another part than the importing one.

    >>> past_the_face(("updaters", "step"), ("replicas",)), past_the_face(("updaters", "step"), ("updaters", "ranks"))
    (False, False)
    >>> past_the_face(("updaters", "step"), ("updaters", "result")), past_the_face(("data",), ("replicas", "pool"))
    (False, True)
    """
    return len(module) > 1 and module[0] not in package[:1]


def test_nothing_is_imported_past_a_part() -> None:
    found = {
        f"{path.relative_to(SOURCE)} imports from lockstep.{'.'.join(module)}"
        for path in SOURCE.rglob("*.py")
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if past_the_face(package_of(path), module)
    }
    assert found == set()


def test_a_deep_import_is_found() -> None:
    deep = "from lockstep.replicas.pool.devices import parse_device\nimport lockstep.data.parts.files as files\n"
    modules = list(imported_modules(deep))
    assert [past_the_face(("updaters", "step"), module) for module in modules] == [True, True]
    assert [past_the_face(("replicas", "group"), modules[0]), past_the_face(("data",), modules[1])] == [False, False]


def rows() -> list[tuple[str, list[str]]]:
    """Read the table of `tests/README.md`: each module with the files of its tests."""
    found = re.findall(
        r"^\| `(\S+)` \| (.+) \|$", (TESTS / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return [(module, re.findall(r"`(.+?)`", files)) for module, files in found]


def test_the_table_of_tests_names_each_module_once() -> None:
    modules = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(module for module, _ in rows()) == sorted(modules)


def test_the_table_of_tests_names_files_that_are_there() -> None:
    missing = {(module, file) for module, files in rows() for file in files if not (TESTS / file).is_file()}
    assert missing == set()
    assert [module for module, files in rows() if not files] == []
