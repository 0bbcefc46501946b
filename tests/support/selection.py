"""Choose which cases of a long table, and which of the slow tests, run every day. The choice depends on no chance."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"


def leave_repeated_values_to_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what `each_value` leaves out: cases whose values of every parameter are in other cases, too.

    Args:
        items: The collected tests.
    """
    functions = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        marked, slow = (item.get_closest_marker(name) is not None for name in ("each_value", "slow"))
        if isinstance(item, pytest.Function) and marked and not slow:
            functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        chosen = chosen_cases(numbered([case.callspec.params for case in cases]), name)
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker("slow")


def numbered(cases: Sequence[Mapping[str, object]]) -> list[dict[str, int]]:
    """Replace each value by its number among those of its parameter.

    pytest hands the same objects to all cases of a product, and need not be able to compare them.

    >>> scales = [1.0, 2.0]
    >>> numbered([{"scale": scales[0]}, {"scale": scales[1]}, {"scale": scales[0]}])
    [{'scale': 0}, {'scale': 1}, {'scale': 0}]
    """
    found = defaultdict[str, dict[int, int]](dict)
    return [
        {name: found[name].setdefault(id(value), len(found[name])) for name, value in case.items()} for case in cases
    ]


def chosen_cases(cases: Sequence[dict[str, int]], seed: str) -> set[int]:
    """Choose few cases in which each value of each parameter occurs; return their indices.

    >>> product = [{"a": a, "b": b} for a in range(3) for b in range(2)]
    >>> chosen = [product[index] for index in chosen_cases(product, "name")]
    >>> len(chosen), {case["a"] for case in chosen}, {case["b"] for case in chosen}
    (3, {0, 1, 2}, {0, 1})

    Args:
        cases: For each case the index of its value by the name of the parameter.
        seed: What the choice depends on; it is the same in each run.
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))  # noqa: S311 - no secret
    missing = {value for case in cases for value in case.items()}
    chosen = set[int]()
    while missing:
        best = max(order, key=lambda index: len(missing & cases[index].items()))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen


def sample_of_slow(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Draw some of the slow tests, in their order.

    Args:
        items: The collected tests.
        number: How many to draw.
    """
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    drawn = random.Random(seed_of_samples()).sample(range(len(slow)), min(number, len(slow)))  # noqa: S311 - no secret
    return [slow[index] for index in sorted(drawn)]


def seed_of_samples() -> str:
    """Return the digest of the changelog: a commit has one sample wherever it is tested, later ones have others."""
    return hashlib.sha256(CHANGELOG.read_bytes()).hexdigest()[:8]
