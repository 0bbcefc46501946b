"""The structure of the source can be taken in: small folders, and imports that stop at a package's face."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep as ls

SOURCE = Path(ls.__file__).parent
MODULES_OF_A_FOLDER = 12


def folders() -> list[Path]:
    return [path.parent for path in SOURCE.rglob("__init__.py")]


def test_folders_are_small() -> None:
    counts = {str(folder.relative_to(SOURCE)): len(list(folder.glob("*.py"))) for folder in folders()}
    assert {folder: count for folder, count in counts.items() if count > MODULES_OF_A_FOLDER} == {}


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
    """Tell whether an import reaches into a package that the importing one is not a part of.

    >>> past_the_face(("updaters", "step"), ("replicas",)), past_the_face(("updaters", "step"), ("updaters", "ranks"))
    (False, False)
    >>> past_the_face(("updaters", "step"), ("updaters", "result")), past_the_face(("data",), ("replicas", "pool"))
    (False, True)
    """
    enclosing = module[:-1]
    return enclosing != package[: len(enclosing)]


def test_nothing_is_imported_past_a_package() -> None:
    found = {
        f"{path.relative_to(SOURCE)} imports from lockstep.{'.'.join(module)}"
        for path in SOURCE.rglob("*.py")
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if past_the_face(package_of(path), module)
    }
    assert found == set()


def test_a_deep_import_is_found() -> None:
    deep = "from lockstep.replicas.pool.devices import parse_device\nimport lockstep.optim.hooked.options as options\n"
    modules = list(imported_modules(deep))
    assert [past_the_face(("updaters", "step"), module) for module in modules] == [True, True]
    assert [past_the_face(("replicas", "pool"), modules[0]), past_the_face(("optim",), modules[1])] == [False, True]
