"""Nests keep their containers, and errors name the field."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.nest import map_tensors, named_tensors, rebuild, rows, tensors


class Pair(NamedTuple):
    left: Any
    right: Any


def same(one: Any, other: Any) -> bool:
    """Compare structure, types of containers, and bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


leaves = st.builds(lambda start: torch.arange(start, start + 6).reshape(3, 2), st.integers(0, 99))
nests = st.recursive(
    leaves | st.none() | st.text(max_size=2),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3)
        | st.builds(Pair, parts, parts)
    ),
    max_leaves=8,
)


@given(nests)
def test_a_map_of_nothing_changes_nothing(nest: Any) -> None:
    assert same(map_tensors(lambda tensor: tensor, nest), nest)


@given(nests)
def test_all_walks_take_one_order(nest: Any) -> None:
    met: list[torch.Tensor] = []
    map_tensors(met.append, nest)
    assert [id(tensor) for tensor in met] == [id(tensor) for tensor in tensors(nest)]


@given(nests)
def test_a_path_leads_to_its_tensor(nest: Any) -> None:
    paths = [(path, tensor) for path, tensor in named_tensors(nest)]
    assert len({path for path, _ in paths}) == len(paths)
    for path, tensor in paths:
        assert eval(path, {"batch": nest}) is tensor  # noqa: S307 - the path is one that we made


@pytest.mark.parametrize(
    "container", [OrderedDict(x=1), defaultdict(list, x=1), UserDict(x=1), Pair(1, 2), [1, 2], (1, 2)]
)
def test_containers_keep_their_type(container: Any) -> None:
    parts = list(range(10, 10 + len(container)))
    rebuilt = rebuild(container, parts)
    assert type(rebuilt) is type(container)
    assert list(rebuilt.values() if hasattr(rebuilt, "values") else rebuilt) == parts


def test_a_default_survives() -> None:
    assert rebuild(defaultdict(list, x=1), [2]).default_factory is list


def test_a_mapping_that_cannot_change_becomes_a_dict() -> None:
    assert rebuild(MappingProxyType({"x": 1}), [2]) == {"x": 2}


def test_what_torch_returns_keeps_its_type() -> None:
    found = torch.zeros(2, 3).max(dim=1)
    assert type(map_tensors(torch.clone, found)) is type(found)


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        (
            {"x": torch.zeros(4), "y": (torch.zeros(3),)},
            r"`batch\['y'\]\[0\]` must be as long as `batch\['x'\]` along dimension 0 \(4\), got 3\.",
        ),
        ([torch.zeros(4), torch.tensor(1)], r"`batch\[1\]` must have a dimension 0 .*, got shape \(\)\."),
        ({"x": "text"}, r"`batch` must hold at least one tensor, got none\."),
    ],
)
def test_disagreement_is_refused_by_name(nest: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows(nest)
