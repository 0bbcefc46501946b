"""MXNet's forms of keys and values: one key or several, each with one tensor or one per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

from torch import Tensor

Key: TypeAlias = "int | str"
Keys: TypeAlias = "Key | Sequence[Key]"
Values: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]"
"""A tensor, or one tensor per device; for several keys, one of these for each key."""


def group_by_key(key: Keys, tensors: Values, argument: str = "value") -> list[tuple[Key, list[Tensor]]]:
    """Pair each key with its tensors.

    Args:
        key: One key, or a list of keys.
        tensors: For each key a tensor, or one tensor per device.
        argument: The name of the tensors in error messages.

    Raises:
        ValueError: If the numbers of keys and values differ, or a key has no tensor.

    >>> import torch
    >>> [(name, len(parts)) for name, parts in group_by_key(["w", "b"], [torch.ones(1), [torch.ones(1)] * 2])]
    [('w', 1), ('b', 2)]
    """
    several = not isinstance(key, (int, str))
    keys = list(cast("Sequence[Key]", key)) if several else [cast("Key", key)]
    given = list(cast("Sequence[Tensor | Sequence[Tensor]]", tensors if several else [tensors]))
    if len(keys) != len(given):
        raise ValueError(f"`key` must hold as many keys as there are values ({len(given)}), got {len(keys)}.")
    paired = [
        (name, [each] if isinstance(each, Tensor) else list(each)) for name, each in zip(keys, given, strict=True)
    ]
    empty = [name for name, parts in paired if not parts]
    if empty:
        raise ValueError(f"`{argument}` must hold a tensor for each key, and {empty[0]!r} has none.")
    return paired
