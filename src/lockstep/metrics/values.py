"""Name the numbers in the value of a metric, which may be a vector, a matrix, or a dict of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from lockstep.metrics.observed import Mean, Observed

MAX_NUMBERS: Final = 1000
"""The largest number of entries of one value that are observed."""


def flatten_value(name: str, value: Any) -> dict[str, Observed]:
    """Return the numbers in the value of a metric by name.

    A number keeps the name of the metric. Entry i of a vector, such as the score of a class, is named
    ``name/class<i>``, and entry (i, j) of a matrix, such as a confusion matrix, ``name/class<i>/class<j>``. The values
    of a dict, as a collection returns it, are named ``name/<key>``, and those of a tuple or list ``name/<i>``.

    Args:
        name: The name of the metric; if it is empty, the names of its values have no first part.
        value: The value.

    Raises:
        TypeError: If something in the value is not a number.
        ValueError: If the value has more than `MAX_NUMBERS` entries.

    >>> flatten_value("f1", torch.tensor([0.5, 1.0]))
    {'f1/class0': 0.5, 'f1/class1': 1.0}
    >>> flatten_value("", {"matrix": torch.tensor([[3, 1]]), "count": 4})
    {'matrix/class0/class0': 3, 'matrix/class0/class1': 1, 'count': 4}
    """
    found: dict[str, Observed] = {}
    for path, number in _numbers(name, value):
        if len(found) >= MAX_NUMBERS:
            raise ValueError(f"it has more than {MAX_NUMBERS} entries")
        found[path] = number
    return found


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Observed]]:
    """Yield the numbers in a value with their names."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        if value.numel() > MAX_NUMBERS:
            raise ValueError(f"it has {value.numel()} entries, which is more than {MAX_NUMBERS}")
        # As Python numbers, in one transfer instead of one per entry.
        yield from _entries(name, value.detach().tolist())
    elif isinstance(value, Mean | int | float | torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{name}/{key}" if name else str(key), each)
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _numbers(f"{name}/{index}", each)
    elif hasattr(value, "__array__"):
        yield from _numbers(name, torch.as_tensor(value))
    else:
        raise TypeError(f"it holds a {type(value).__name__}, which is not a number")


def _entries(name: str, values: list[Any]) -> Iterator[tuple[str, Observed]]:
    """Yield the entries of a tensor with their names."""
    for index, value in enumerate(values):
        if isinstance(value, list):
            yield from _entries(f"{name}/class{index}", value)
        else:
            yield f"{name}/class{index}", value
