"""Notice that the attributes of a dataset have changed, of which worker processes hold copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import torch

SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""The types whose values are compared."""

MOST_ENTRIES: Final = 100
"""The number of entries up to which a container is looked into. A larger one is compared by its length."""

MOST_OBJECTS: Final = 1000
"""The number of objects that are looked at most, so that a comparison takes far less time than loading a batch."""


@final
class DatasetState:
    """What the attributes of a dataset refer to at one moment.

    Numbers and strings are compared by value, tensors by their in-place changes, and other objects by identity and by
    their own attributes. Elements of arrays and of long containers are not compared.

    Args:
        dataset: The dataset.

    >>> class Crops:
    ...     size = 3
    >>> dataset = Crops()
    >>> before = DatasetState(dataset)
    >>> before.same_as(DatasetState(dataset))
    True
    >>> dataset.size = 4
    >>> before.same_as(DatasetState(dataset))
    False
    """

    __slots__ = ("_held", "_values")

    def __init__(self, dataset: object) -> None:
        self._values: list[object] = []
        # Held, because the address of an object that is freed may be that of its successor.
        self._held: dict[int, object] = {}
        self._visit(dataset)

    def same_as(self, other: DatasetState) -> bool:
        """Return whether another state of the same dataset is equal.

        Args:
            other: The other state.
        """
        return self._values == other._values

    def _visit(self, value: Any) -> None:
        """Record a value and what it refers to."""
        kind = type(value)
        if kind in SCALARS:
            self._values += (kind, value)
            return
        if kind is not tuple:
            self._values.append(id(value))
            if id(value) in self._held or len(self._held) >= MOST_OBJECTS:
                return
            self._held[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._values.append(None if value.is_inference() else value._version)
        else:
            for each in _parts(value):
                self._visit(each)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what an object refers to, without the entries of a long container."""
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        yield len(value)
        if len(value) <= MOST_ENTRIES:
            yield from value.items() if isinstance(value, Mapping) else value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield value.__self__
    if not isinstance(value, type | ModuleType | FunctionType):
        yield from list(getattr(value, "__dict__", {}).items())
