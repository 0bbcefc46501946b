"""Trees of plain values and tensors as JSON, and back.

JSON has neither integer keys nor tuples nor infinities, all of which optimizers and schedulers keep. An object with one
key that begins with ``$`` stands for them, and everything else is written as it is::

    {"$tuple": [0.9, 0.999]}   {"$float": "inf"}   {"$items": [[0, {"step": 3}]]}   {"$counter": [[30, 1]]}
    {"$tensor": ["state.safetensors", "optimizer/state/0/exp_avg"]}
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch

Path: TypeAlias = tuple[Any, ...]
"""The keys and indices that lead to a part of a tree."""

INTEGER_BITS: Final = 1024
"""The largest integers have this many bits."""
CONTAINERS: Final = 16
"""How deep containers may be nested. Each takes up to three levels of JSON, which has a limit when it is read."""

_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_TUPLES: Final = frozenset({tuple, torch.Size})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_NON_FINITE: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Leaf(NamedTuple):
    """A tensor that was found in a tree.

    Attributes:
        path: Where it was found.
        tensor: The tensor.
        tagged: What stands for it in the JSON, an object whose ``$tensor`` is to be set.
    """

    path: Path
    tensor: torch.Tensor
    tagged: dict[str, Any]


def encode(value: Any, path: Path, leaves: list[Leaf]) -> Any:
    """Convert a tree into new values that JSON can write.

    Args:
        value: The tree.
        path: The path of the tree, which begins with its name.
        leaves: The tensors that were found so far. Those of the tree are appended.

    Raises:
        TypeError: If the tree holds something that a snapshot cannot hold. The message names its path.

    >>> encode({"betas": (0.9, float("inf")), 0: None}, ("state",), [])
    {'$items': [['betas', {'$tuple': [0.9, {'$float': 'inf'}]}], [0, None]]}
    """
    kind = type(value)
    if value is None or kind is str or kind is bool or (kind is int and value.bit_length() <= INTEGER_BITS):
        return value
    if isinstance(value, torch.Tensor):
        leaves.append(Leaf(path, value, {"$tensor": None}))
        return leaves[-1].tagged
    if isinstance(value, float):
        # NumPy's float64 is the same number.
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if len(path) <= CONTAINERS:
        if kind is list or kind in _TUPLES:
            parts = [encode(part, (*path, index), leaves) for index, part in enumerate(value)]
            return parts if kind is list else {"$tuple": parts}
        if kind in _MAPPINGS:
            if kind is not Counter and all(type(key) is str and key[:1] != "$" for key in value):
                return {key: encode(part, (*path, key), leaves) for key, part in value.items()}
            pairs = [[_key(key, path), encode(part, (*path, key), leaves)] for key, part in value.items()]
            return {"$counter" if kind is Counter else "$items": pairs}
    raise _unsupported(value, path)


def _key(key: Any, path: Path) -> Any:
    if type(key) in _PLAIN:
        return encode(key, path, [])
    raise _unsupported(key, path)


def _unsupported(value: Any, path: Path) -> TypeError:
    got = (
        f"an integer of {value.bit_length()} bits" if type(value) is int else f"a value of type {type(value).__name__}"
    )
    return TypeError(
        "A snapshot holds tensors, numbers, text and None, and dicts, lists and tuples of these, at most "
        f"{CONTAINERS} within each other, got {got} at {'.'.join(map(str, path))}."
    )


def decode(tagged: Any, tensor: Callable[[Any], Any], depth: int) -> Any:
    """Convert values that JSON has read into the tree that they stand for.

    Args:
        tagged: What `encode` returned.
        tensor: Returns what stands for a tensor, given the value of ``$tensor``.
        depth: How deep values may be nested.

    Raises:
        ValueError: If it is not something that `encode` returns.

    >>> decode({"$items": [["betas", {"$tuple": [0.9, {"$float": "inf"}]}], [0, None]]}, str, depth=9)
    {'betas': (0.9, inf), 0: None}
    """
    if depth == 0:
        raise ValueError("values are nested too deeply")
    if isinstance(tagged, list):
        return [decode(part, tensor, depth - 1) for part in tagged]
    if isinstance(tagged, dict):
        if not any(key[:1] == "$" for key in tagged):
            return {key: decode(part, tensor, depth - 1) for key, part in tagged.items()}
        [(tag, body)] = tagged.items() if len(tagged) == 1 else [("", None)]
        return _untagged(tag, body, tensor, depth - 1)
    if isinstance(tagged, float) and not math.isfinite(tagged):
        raise ValueError(f"{tagged} is no number in JSON")
    if isinstance(tagged, int) and tagged.bit_length() > INTEGER_BITS:
        raise ValueError(f"an integer has {tagged.bit_length()} bits")
    return tagged


def _untagged(tag: str, body: Any, tensor: Callable[[Any], Any], depth: int) -> Any:
    if tag == "$tensor":
        return tensor(body)
    if tag == "$float" and isinstance(body, str) and body in _NON_FINITE:
        return _NON_FINITE[body]
    if tag == "$tuple" and isinstance(body, list):
        return tuple(decode(body, tensor, depth))
    if tag in {"$items", "$counter"} and isinstance(body, list) and all(is_list(each, 2) for each in body):
        keys = [decode(key, tensor, depth) for key, _ in body]
        # Keys that are equal though they are written differently, such as 1 and 1.0, would lose values.
        if all(type(key) in _PLAIN for key in keys) and len(set(keys)) == len(keys):
            pairs = dict(zip(keys, [decode(part, tensor, depth) for _, part in body], strict=True))
            return Counter(pairs) if tag == "$counter" else pairs
    raise ValueError(f"the tag {tag!r} is unknown, or stands for something else")


def is_list(value: Any, length: int) -> bool:
    """Return whether a value that JSON has read is a list of some length."""
    return isinstance(value, list) and len(value) == length
