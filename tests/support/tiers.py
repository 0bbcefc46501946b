"""Sort tests into tiers by what they use, so that the fast ones can be run alone.

What a test uses are the names in its code, in its fixtures, and in all code of the tests that these lead to. A
test may be in several tiers; in `unit` are those that are in no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = {"laws": "laws", "reference": "reference", "examples": "programs"}
"""The tiers of folders."""
USES = {
    "processes": {
        "NotebookClient",
        "fork",
        "hosts",
        "launch",
        "multiprocessing",
        "num_workers",
        "run_on_ranks",
        "run_verify",
        "run_with_second_chance",
        "spawn",
        "spawned_by_forks",
        "subprocess",
    },
    "laws": {"DAILY", "EQUAL", "PLACEMENTS", "UNEVEN", "digests"},
    "programs": {"runpy"},
    "compiled": {"fresh_compiler"},
    "deadlines": {"Heartbeat", "here_it_hangs", "wait_patiently"},
}
"""The names that whatever belongs to a tier cannot do without."""
MANY_CASES = 10
"""A function with so many cases is a table."""
COLLECTIONS = (list, tuple, set, frozenset)


def sort_into_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark each of the collected tests with its tiers."""
    cases = Counter(_function_of(item) for item in items)
    for item in items:
        for tier in tiers_of(item, cases[_function_of(item)]):
            item.add_marker(tier)


def has_no_unit_tests(path: Path) -> bool:
    """Return whether all tests in a file or folder are in the tier of a folder.

    >>> has_no_unit_tests(TESTS / "laws" / "test_ranks.py"), has_no_unit_tests(TESTS / "data")
    (True, False)
    """
    return path.is_relative_to(TESTS) and not FOLDERS.keys().isdisjoint(path.relative_to(TESTS).parts)


def tiers_of(item: pytest.Item, num_cases: int = 1) -> set[str]:
    """Return the names of the tiers that a test belongs to.

    Args:
        item: The test.
        num_cases: How many tests its function makes.
    """
    reached = [names_reached(each) for each in _parts(item)]
    found = {tier for tier, uses in USES.items() if not all(map(uses.isdisjoint, reached))}
    if has_no_unit_tests(item.path):
        found |= {FOLDERS[part] for part in item.path.relative_to(TESTS).parts if part in FOLDERS}
    if num_cases >= MANY_CASES or _drawn(item) is not None:
        found.add("tables")
    return found or {"unit"}


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _drawn(item: pytest.Item) -> FunctionType | None:
    """Return the function that Hypothesis calls with the examples it draws; None of a test without it."""
    handle = getattr(getattr(item, "function", None), "hypothesis", None)
    return None if handle is None else handle.inner_test


def _parts(item: pytest.Item) -> Iterator[object]:
    """Yield what a test consists of: its function, its fixtures and their names, its arguments."""
    if isinstance(item, pytest.DoctestItem):
        yield from (compile(each.source, item.name, "single") for each in item.dtest.examples)
    if isinstance(item, pytest.Function):
        yield _drawn(item) or item.function
        yield dict.fromkeys(item.fixturenames)
        fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
        yield from (each for each in fixtures if each.__module__ != "tests.conftest")  # which all tests use
        yield from filter(_is_followed, item.callspec.params.values() if hasattr(item, "callspec") else ())


def names_reached(beginning: object) -> set[str]:
    """Return the names in some code, and in all code of the tests that it leads to by them.

    Args:
        beginning: A function, class or code object; or a collection of them.
    """
    return _names_reached_once(beginning) if isinstance(beginning, FunctionType) else _follow(beginning)


def _follow(beginning: object) -> set[str]:
    names, waiting, seen = set[str](), [beginning], dict[int, object]()
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value  # kept alive, so that no other object gets its number
            names |= _names_in(value)
            waiting += _reached_from(value)
    return names


_names_reached_once = cache(_follow)


def _names_in(value: object) -> set[str]:
    """Return the names in the code of one function, with arguments and functions inside it, or in a mapping."""
    if isinstance(value, Mapping):
        return {key for key in value if isinstance(key, str)}
    code = value.__code__ if isinstance(value, FunctionType) else value
    if not isinstance(code, CodeType):
        return set()
    keywords = {name for each in code.co_consts if isinstance(each, tuple) for name in each if isinstance(name, str)}
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(code.co_varnames, keywords, *inner)


def _reached_from(value: object) -> Iterator[object]:
    """Yield what one object leads to: code of the tests, and collections in which such code may be."""
    if isinstance(value, FunctionType):
        yield from filter(_is_followed, _named_by(value))
    elif isinstance(value, type):
        yield from filter(_is_followed, vars(value).values())
    elif isinstance(value, partial):
        yield from filter(_is_followed, (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, classmethod | staticmethod | MethodType):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, Mapping):
        yield from filter(_is_followed, value.values())
    elif isinstance(value, COLLECTIONS):
        yield from filter(_is_followed, value)
    else:
        yield from filter(_is_followed, [type(value)])


def _named_by(function: FunctionType) -> Iterator[object]:
    """Yield the globals that a function names, the attributes of modules among them, and what it encloses."""
    names = _names_in(function)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and value.__name__.startswith("tests."):
            yield from (vars(value)[each] for each in names & vars(value).keys())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of a cell that is still empty
            yield cell.cell_contents


def _is_followed(value: object) -> bool:
    """Return whether something is code of the tests, an object of a class of theirs, or may hold either."""
    if isinstance(value, (partial, classmethod, staticmethod, MethodType, property, Mapping, *COLLECTIONS)):
        return True
    return (value if isinstance(value, FunctionType | type) else type(value)).__module__.startswith("tests.")
