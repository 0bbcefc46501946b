"""The originals' names stay a thin layer."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep.compat

FOLDER = Path(lockstep.compat.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_module_is_short(module: Path) -> None:
    assert len(module.read_text(encoding="utf-8").splitlines()) < 250


def test_there_are_modules_to_look_at() -> None:
    assert {path.stem for path in MODULES} >= {"optimizers", "updater", "nnabla", "group", "torch7"}
