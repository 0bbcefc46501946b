"""Trees of plain values and tensors: copying them by value, and writing them as JSON.

JSON has neither integer keys nor tuples nor infinities, all of which optimizers and schedulers keep. An object with one
key that begins with ``$`` stands for them, and everything else is written as it is::

    {"$tuple": [0.9, 0.999]}   {"$float": "inf"}   {"$items": [[0, {"step": 3}]]}   {"$counter": [[30, 1]]}
    {"$tensor": ["state.safetensors", "optimizer/state/0/exp_avg"]}
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lockstep.errors import SnapshotError

Path: TypeAlias = tuple[Any, ...]
"""The keys and indices that lead to a part of a tree."""

INTEGER_BITS: Final = 1024
"""The largest integers have this many bits."""

CONTAINERS: Final = 16
"""How deep containers may be nested. Each takes up to three levels of JSON, which has a limit when it is read."""

_SHORT: Final = 1 << 62
"""Integers below this are looked at in place, such as the numbers of the parameters of an optimizer."""
_UNBOUNDED: Final = frozenset({type(None), bool, float, str})
_PLAIN: Final = _UNBOUNDED | {int}
_TUPLES: Final = frozenset({tuple, torch.Size})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS: Final = frozenset({list}) | _MAPPINGS | _TUPLES
_NON_FINITE: Final = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class TensorIndex(int):
    """The place of a tensor in a frozen tree: its index in the list of all tensors."""

    __slots__ = ()


class _Indices(dict[int, TensorIndex]):
    """Tensor indices by their number, each created once: thousands of them would take longer than the copy."""

    def __missing__(self, number: int) -> TensorIndex:
        self[number] = found = TensorIndex(number)
        return found


_INDICES: Final = _Indices()


class _Table(NamedTuple):
    """A dict of dicts that all have the same keys and only tensors, as optimizers keep one per parameter.

    Attributes:
        rows: The keys of the dict.
        columns: The keys of each dict in it.
        first: The number of the first tensor; the others follow, row by row.
    """

    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    first: int

    def to_dict(self) -> dict[Any, Any]:
        """Return the dict with a `TensorIndex` for each tensor."""
        numbers = iter(range(self.first, self.first + len(self.rows) * len(self.columns)))
        return {row: {column: TensorIndex(next(numbers)) for column in self.columns} for row in self.rows}


class _UnsupportedError(Exception):
    """A value that no snapshot holds; `freeze` finds its path."""


def freeze(tree: Any, tensors: list[torch.Tensor], *, of: str) -> Any:
    """Copy a tree by value, with a `TensorIndex` for each tensor.

    Args:
        tree: The tree.
        tensors: The tensors that were found so far. Those of the tree are appended.
        of: The name of the tree in the error message.

    Raises:
        TypeError: If the tree holds something that a snapshot cannot hold. The message names its path.

    >>> freeze({"lr": 0.5, "step": torch.zeros(())}, [], of="state")
    {'lr': 0.5, 'step': 0}
    """
    try:
        return _freeze(tree, tensors, CONTAINERS)
    except _UnsupportedError:
        # Paths are found only now, because building one per value would take longer than copying the tensors.
        path, value = next(_unsupported(tree, (of,)))
        raise TypeError(
            "A snapshot holds tensors, numbers, text and None, and dicts, lists and tuples of these, got "
            f"{_described(value)} at {'.'.join(map(str, path))}."
        ) from None


def _freeze(value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    kind = type(value)
    if kind in _MAPPINGS and depth:
        if depth > 1 and kind is not Counter and (table := _table(value, tensors)):
            return table
        parts = _freeze_values(value, tensors, depth)
        return Counter(parts) if kind is Counter else parts
    if kind in _CONTAINERS and depth:
        found = [
            part if type(part) is int and 0 <= part < _SHORT else _freeze(part, tensors, depth - 1) for part in value
        ]
        return tuple(found) if kind in _TUPLES else found
    if kind in _PLAIN and (kind is not int or value.bit_length() <= INTEGER_BITS):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _INDICES[len(tensors) - 1]
    if isinstance(value, float):
        # NumPy's float64 is the same number.
        return float(value)
    raise _UnsupportedError


def _freeze_values(value: dict[Any, Any], tensors: list[torch.Tensor], depth: int) -> dict[Any, Any]:
    parts = {}
    for key, part in value.items():
        if type(key) not in _PLAIN:
            raise _UnsupportedError
        # Here and not by a call for each, because training waits while thousands of them are found.
        if type(part) is torch.Tensor:
            parts[key] = _INDICES[len(tensors)]
            tensors.append(part)
        elif type(part) in _UNBOUNDED:
            parts[key] = part
        else:
            parts[key] = _freeze(part, tensors, depth - 1)
    return parts


def _table(value: dict[Any, Any], tensors: list[torch.Tensor]) -> _Table | None:
    """Freeze a dict as a table if it is one. Nothing here runs once per tensor in Python."""
    inner = value.values()
    if set(map(type, inner)) != {dict}:
        return None
    columns = tuple(next(iter(inner)))
    found = list(chain.from_iterable(map(dict.values, inner)))
    keys_differ = set(map(tuple, inner)) != {columns} or not _PLAIN.issuperset(map(type, (*value, *columns)))
    if keys_differ or set(map(type, found)) != {torch.Tensor}:
        return None
    tensors += found
    return _Table(tuple(value), columns, len(tensors) - len(found))


def _unsupported(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the unsupported values of a tree with their paths."""
    kind = type(value)
    if kind in _CONTAINERS and len(path) <= CONTAINERS:
        pairs = value.items() if issubclass(kind, dict) else enumerate(value)
        for key, part in pairs:
            if type(key) not in _PLAIN:
                yield path, key
            yield from _unsupported(part, (*path, key))
        return
    try:
        _freeze(value, [], 0)
    except _UnsupportedError:
        yield path, value


def _described(value: Any) -> str:
    if type(value) is int:
        return f"an integer of {value.bit_length()} bits"
    return f"a value of type {type(value).__name__}"


def encode(tree: Any, reference: Callable[[TensorIndex, Path], object], path: Path = ()) -> Any:
    """Convert a frozen tree into values that JSON can write.

    Args:
        tree: The frozen tree.
        reference: Returns what stands for a tensor, given its index and its path.
        path: The path of the tree.

    >>> encode({"betas": (0.9, float("inf")), 0: None}, lambda index, path: None)
    {'$items': [['betas', {'$tuple': [0.9, {'$float': 'inf'}]}], [0, None]]}
    """

    def part(value: Any, key: Any) -> Any:
        return encode(value, reference, (*path, key))

    if isinstance(tree, _Table):
        tree = tree.to_dict()
    if isinstance(tree, TensorIndex):
        return {"$tensor": reference(tree, path)}
    if isinstance(tree, list | tuple):
        parts = [part(value, index) for index, value in enumerate(tree)]
        return {"$tuple": parts} if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        if type(tree) is dict and all(type(key) is str and not key.startswith("$") for key in tree):
            return {key: part(value, key) for key, value in tree.items()}
        pairs = [[encode(key, reference), part(value, key)] for key, value in tree.items()]
        return {"$counter" if isinstance(tree, Counter) else "$items": pairs}
    return {"$float": str(tree)} if isinstance(tree, float) and not math.isfinite(tree) else tree


def decode(tagged: Any, tensor: Callable[[Any], Any]) -> Any:
    """Convert values that JSON has read into the tree that they stand for.

    Args:
        tagged: What `encode` returned. Its depth must have been checked.
        tensor: Returns the tensor for what `reference` returned.

    Raises:
        SnapshotError: If it is not something that `encode` returns.

    >>> decode({"$items": [["betas", {"$tuple": [0.9, {"$float": "inf"}]}], [0, None]]}, lambda reference: None)
    {'betas': (0.9, inf), 0: None}
    """
    if isinstance(tagged, list):
        return [decode(part, tensor) for part in tagged]
    if not isinstance(tagged, dict):
        return tagged
    if not any(key.startswith("$") for key in tagged):
        return {key: decode(part, tensor) for key, part in tagged.items()}
    tag, body = next(iter(tagged.items()))
    if len(tagged) == 1 and (tag == "$tensor" or isinstance(body, list if tag != "$float" else str)):
        return _untagged(tag, body, tensor)
    raise SnapshotError(f"A value with the tag {tag!r} is not of the form that this format defines.")


def _untagged(tag: str, body: Any, tensor: Callable[[Any], Any]) -> Any:
    if tag == "$tensor":
        return tensor(body)
    if tag == "$tuple":
        return tuple([decode(part, tensor) for part in body])
    if tag == "$float" and body in _NON_FINITE:
        return _NON_FINITE[body]
    if tag in {"$items", "$counter"}:
        pairs = dict(_pair(each, tensor) for each in body)
        # Keys that are equal though they are written differently, such as 1 and 1.0, would lose values.
        if len(pairs) == len(body):
            return Counter(pairs) if tag == "$counter" else pairs
    raise SnapshotError(f"A value with the tag {tag!r} is not of the form that this format defines.")


def _pair(each: Any, tensor: Callable[[Any], Any]) -> tuple[Any, Any]:
    if is_list(each, 2):
        key = decode(each[0], tensor)
        if type(key) in _PLAIN:
            return key, decode(each[1], tensor)
    raise SnapshotError("A mapping must consist of pairs of a plain key and a value.")


def is_list(value: Any, length: int) -> bool:
    """Return whether a value that JSON has read is a list of some length."""
    return isinstance(value, list) and len(value) == length
