"""The map from the originals: every entry leads somewhere, and nothing of the documents was left out."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from traces import reference_folder

from lockstep.compat import chainer, nnabla

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "origins.toml"
ORIGINS: dict[str, list[dict[str, Any]]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
KINDS = {"class", "parameter", "method", "attribute", "note"}
FIELDS = {"document", "kind", "name", "says", "path", "test"}
OPTIONAL = {"signature", "default", "core", "difference"}


def some_solver() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters())


NEW: dict[str, Callable[[], Any]] = {
    "lockstep.compat.chainer.CorrectedMomentumSGD": chainer.CorrectedMomentumSGD,
    "lockstep.compat.nnabla.DynamicLossScalingUpdater": lambda: nnabla.DynamicLossScalingUpdater(
        some_solver(), torch.Tensor
    ),
    "lockstep.CorrectedMomentumSGD": chainer.CorrectedMomentumSGD,
}
"""Makes a new object of each class that has attributes in the list."""


def found(path: str) -> Any:
    """Find what a path leads to: a module's name, a class, its method, or an attribute of a new object."""
    owner, _, last = path.rpartition(".")
    if owner in NEW and last in vars(NEW[owner]()) | properties(type(NEW[owner]())):
        return getattr(NEW[owner](), last)
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            place: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            place = getattr(place, part)
        return place
    raise AssertionError(f"{path} leads nowhere")


def properties(kind: type) -> dict[str, Any]:
    return {name: each for name, each in inspect.getmembers(kind) if not callable(each)}


def parameters(path: str) -> list[inspect.Parameter]:
    """List what a class or function takes, but what is bound already."""
    listed = list(inspect.signature(found(path)).parameters.values())
    return listed[1:] if listed and listed[0].name == "self" else listed


def shown(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) or inspect.ismodule(value) else repr(value)


def spelled(path: str) -> str:
    """Write a signature as the list does: without annotations, and without what is by keyword only."""
    kept = [each for each in parameters(path) if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    words = []
    for each in kept:
        star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is inspect.Parameter.empty else f"={shown(each.default)}"
        words.append(f"{star}{each.name}{default}")
        is_last_positional = each.kind is inspect.Parameter.POSITIONAL_ONLY and each is kept[-1]
        words += ["/"] if is_last_positional else []
    return f"({', '.join(words)})"


def full(system: str, path: str) -> str:
    return path if path.startswith("lockstep.") else f"lockstep.compat.{system}.{path}"


def check_parameter(path: str, default: str | None) -> None:
    """Find a parameter, and compare its default."""
    owner, _, name = path.removesuffix(")").partition("(")
    named = {each.name: each for each in parameters(owner)}
    assert name in named, f"{path}: there are {list(named)}"
    has = named[name].default
    if default is not None:
        assert shown(has) == default, path


@pytest.mark.parametrize("system", ORIGINS)
def test_the_entries_lead_somewhere(system: str) -> None:
    for entry in ORIGINS[system]:
        check_entry(system, entry)


def check_entry(system: str, entry: dict[str, Any]) -> None:
    assert FIELDS <= entry.keys() <= FIELDS | OPTIONAL, entry
    assert entry["kind"] in KINDS, entry
    path = full(system, entry["path"])
    if path.endswith(")"):
        check_parameter(path, entry.get("default"))
    elif entry["kind"] == "attribute":
        value = found(path)
        assert "default" not in entry or shown(value) == entry["default"], path
    else:
        assert callable(found(path)), path
    if "signature" in entry:
        assert spelled(path) == entry["signature"]
    core = entry.get("core")
    if core is not None:
        assert not core.startswith("lockstep.compat"), path
        check_parameter(core, None) if core.endswith(")") else found(core)


@cache
def statements_of(file: str) -> list[ast.stmt]:
    return ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body


def test_the_tests_of_the_entries_are_there() -> None:
    for test in {entry["test"] for entries in ORIGINS.values() for entry in entries}:
        file, *names = test.split("::")
        body = statements_of(file)
        for name in names:
            (place,) = [each for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name]
            body = place.body
        assert names[-1].startswith("test_"), test


def test_a_path_that_leads_nowhere_is_noticed() -> None:
    for path in ("nothing.at.all", "lockstep.nothing", "lockstep.compat.chainer.ParallelUpdater.nothing"):
        with pytest.raises((AssertionError, AttributeError)):
            found(path)
    with pytest.raises(AssertionError, match="there are"):
        check_parameter("lockstep.compat.torch7.GPU(nothing)", None)
    with pytest.raises(AssertionError):
        check_parameter("lockstep.compat.torch7.GPU(out_device)", "1")
    assert spelled("lockstep.compat.torch7.GPU") == "(module, device, out_device=None)"


def test_no_entry_is_there_twice() -> None:
    for entries in ORIGINS.values():
        keys = [(entry["document"], entry["kind"], entry["name"]) for entry in entries]
        assert sorted(set(keys)) == sorted(keys)


NOT_IN_THE_DOCUMENTS = {"DataParallelTable.backward(scale)"}
"""Parameters that the originals have and their documents do not speak of."""


def test_every_parameter_of_a_listed_signature_has_an_entry() -> None:
    for system, entries in ORIGINS.items():
        paths = {entry["path"] for entry in entries} | NOT_IN_THE_DOCUMENTS
        for entry in entries:
            if "signature" in entry:
                names = [each.name for each in parameters(full(system, entry["path"]))]
                listed = [name for name in names if re.search(rf"\b{name}\b", entry["signature"])]
                assert {f"{entry['path']}({name})" for name in listed} <= paths


def names_in_000(text: str) -> set[str]:
    return set(re.findall(r"^\s*• (\w+) ", text, re.MULTILINE))


def names_in_001(text: str) -> set[str]:
    given = text[text.index("DynamicLossScalingUpdater(") : text.index(")[source]")]
    return set(re.findall(r"[(, ](\w+)(?==|,)", given)) | set(re.findall(r"^(\w+)¶", text, re.MULTILINE))


def names_in_002(text: str) -> set[str]:
    return set(re.findall(r"^\s*\d+\.\s+(?:final )?def ([^\s(:\[]+)", text, re.MULTILINE))


def names_in_003(text: str) -> set[str]:
    called = set(re.findall(r"[:.](\w+)\(", text)) | set(re.findall(r"\[(\w+)\]", text))
    return (called | {"GPU", "updateOutput", "accGradParameters"}) - {"Sequential"}  # the last is torch's own


def names_in_004(text: str) -> set[str]:
    patterns = [r"^(\w+)\([^)]*\)(?:\[source\])?$", r"^• (\w+) \(", r"^(\w+) = "]
    return {name for pattern in patterns for name in re.findall(pattern, text, re.MULTILINE)}


READ = {
    "000": names_in_000,
    "001": names_in_001,
    "002": names_in_002,
    "003": names_in_003,
    "004": names_in_004,
}


def documents() -> list[Any]:
    folder = reference_folder()
    seeds = None if folder is None else folder.parent / "seeds"
    if seeds is None or not seeds.is_dir():
        reason = "no documents: there is no folder seeds beside the reference folder"
        return [pytest.param(None, None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(number, next(seeds.glob(f"{number}_*")), id=number) for number in READ]


@pytest.mark.parametrize(("number", "file"), documents())
def test_every_name_of_a_document_has_an_entry(number: str, file: Path) -> None:
    entries = [entry for listed in ORIGINS.values() for entry in listed if entry["document"] == number]
    assert entries
    names = READ[number](file.read_text(encoding="utf-8"))
    assert len(names) > 3
    named = [entry["name"] for entry in entries if entry["kind"] != "note"]
    listed = {word for name in named for word in re.findall(r"[\w!=#]+", name)}
    assert names - listed == set()
