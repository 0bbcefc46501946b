"""JSON of which every value has exactly one form, read with limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from lockstep.errors import SnapshotError

INTEGER_DIGITS: Final = 310
"""The digits, with a sign, of an integer of 1024 bits."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what is read, so that a damaged or hostile file costs bounded time and memory.

    Attributes:
        manifest_bytes: The size of a manifest.
        depth: The depth of nested lists and objects in a manifest.
        nodes: The number of values in a manifest.
        header_bytes: The size of the header of a tensor file.
        tensors: The number of tensors in a file.
        dimensions: The number of dimensions of a tensor.
    """

    manifest_bytes: int = 64 << 20
    depth: int = 64
    nodes: int = 1_000_000
    header_bytes: int = 16 << 20
    tensors: int = 100_000
    dimensions: int = 64


def dumps(value: Any) -> bytes:
    """Write a value as JSON in ASCII without spaces, with the keys in their order.

    >>> dumps({"b": [1, 0.5, None], "a": "text"})
    b'{"b":[1,0.5,null],"a":"text"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(raw: bytes, limits: Limits) -> Any:
    """Read JSON that `dumps` wrote.

    Args:
        raw: The text.
        limits: Bounds on its size.

    Raises:
        SnapshotError: If it is anything that `dumps` does not write, has a key twice, or exceeds a limit.
    """
    # Every value but the first follows a comma or opens a container, so this bounds the memory before parsing starts.
    nodes = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if len(raw) > limits.manifest_bytes or nodes > limits.nodes:
        raise SnapshotError(
            f"The manifest must have at most {limits.manifest_bytes} bytes and {limits.nodes} values, "
            f"got {len(raw)} bytes and up to {nodes} values."
        )
    try:
        value = json.loads(raw.decode("ascii"), object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
        _check_depth(value, limits.depth)
        canonical = dumps(value) == raw
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"The manifest is not JSON that this library writes: {error}") from error
    if not canonical:
        raise SnapshotError("The manifest is not in its canonical form.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > INTEGER_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _check_depth(value: Any, depth: int) -> None:
    """Check the depth without recursion, because the depth is what has not been checked yet."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            part
            for parent in level
            if isinstance(parent, list | dict)
            for part in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {depth} levels deep")
