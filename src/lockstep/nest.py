"""Walk nested batches: tuples, lists, dicts, named tuples and dataclasses with tensors at their ends.

Models take and give such nests, and whoever cuts or moves a batch must reach every tensor in it.
Containers keep their type; whatever is neither a container nor a tensor is passed on as it is.
A tensor is called by the path that leads to it, written as Python would: ``batch['image'][0]``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Call a function on every tensor and put what it returns into containers of the same kind.

    >>> map_tensors(len, {"x": torch.zeros(3, 2), "pair": (torch.zeros(4), "a name")})
    {'x': 3, 'pair': (4, 'a name')}
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return rebuild(nest, [map_tensors(function, part) for part in nest.values()])
    if isinstance(nest, tuple | list):
        return rebuild(nest, [map_tensors(function, part) for part in nest])
    if is_record(nest):
        return rebuild(nest, [map_tensors(function, part) for part in record_parts(nest).values()])
    return nest


def tensors(nest: Any) -> list[torch.Tensor]:
    """List every tensor, in the order in which the containers hold them.

    >>> [len(tensor) for tensor in tensors({"x": torch.zeros(3), "pair": (torch.zeros(4), "a name")})]
    [3, 4]
    """
    if isinstance(nest, torch.Tensor):
        return [nest]
    return [tensor for _, tensor in named_tensors(nest)]


def named_tensors(nest: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its path, which starts with ``name``.

    >>> [path for path, _ in named_tensors({"x": torch.zeros(3), "pair": (torch.zeros(4), "a name")})]
    ["batch['x']", "batch['pair'][0]"]
    """
    if isinstance(nest, torch.Tensor):
        yield name, nest
    elif isinstance(nest, Mapping):
        for key, part in nest.items():
            yield from named_tensors(part, f"{name}[{key!r}]")
    elif isinstance(nest, tuple | list):
        for index, part in enumerate(nest):
            yield from named_tensors(part, f"{name}[{index}]")
    elif is_record(nest):
        for key, part in record_parts(nest).items():
            yield from named_tensors(part, f"{name}.{key}")


def is_record(nest: Any) -> bool:
    """Tell an object of a dataclass, which is a container by the names of its fields."""
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def record_parts(record: Any) -> dict[str, Any]:
    """Give what the fields of such an object hold; one that was never set is left out."""
    names = [each.name for each in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def rows(nest: Any, dim: int = 0, *, name: str = "batch") -> int:
    """Say how long all tensors are along one dimension: the number of samples they hold.

    Args:
        nest: A nest with at least one tensor.
        dim: The dimension that counts samples; negative ones count from the end.
        name: What errors call the nest.

    Raises:
        ValueError: There is no tensor, one lacks the dimension, or two differ in length; both are named.

    >>> rows((torch.zeros(4, 2), {"y": torch.zeros(4)}))
    4
    """
    first = ""
    length = -1
    for path, tensor in named_tensors(nest, name):
        if not -tensor.dim() <= dim < tensor.dim():
            shape = tuple(tensor.shape)
            raise ValueError(f"`{path}` must have a dimension {dim} to count samples by, got shape {shape}.")
        if length < 0:
            first, length = path, tensor.shape[dim]
        elif tensor.shape[dim] != length:
            rule = f"must be as long as `{first}` along dimension {dim} ({length})"
            raise ValueError(f"`{path}` {rule}, got {tensor.shape[dim]}.")
    if length < 0:
        raise ValueError(f"`{name}` must hold at least one tensor, got none.")
    return length


def narrow(nest: Any, part: range, dim: int = 0, *, name: str = "batch") -> Any:
    """Cut the same run of samples out of every tensor; the pieces are views, nothing is copied.

    Args:
        nest: A nest with at least one tensor, all of one length along ``dim``.
        part: The samples to keep, a run without gaps.
        dim: The dimension that counts samples.
        name: What errors call the nest.

    Raises:
        ValueError: The tensors differ in length, or the run has gaps or leaves them.

    >>> narrow({"x": torch.arange(5), "name": "five"}, range(1, 3))
    {'x': tensor([1, 2]), 'name': 'five'}
    """
    length = rows(nest, dim, name=name)
    if part.step != 1 or not 0 <= part.start <= part.stop <= length:
        raise ValueError(f"`part` must be a run of neighbours within range(0, {length}), got {part}.")
    return map_tensors(lambda tensor: tensor.narrow(dim, part.start, len(part)), nest)


def rebuild(container: Any, parts: Iterable[Any]) -> Any:
    """Make a container like the given one, of any kind, around other parts in the same order.

    >>> rebuild({"x": 1, "y": 2}, [10, 20])
    {'x': 10, 'y': 20}
    """
    if type(container) is tuple or type(container) is list:
        return type(container)(parts)
    if isinstance(container, MutableMapping):
        # A copy keeps what a constructor call would lose, such as the default of a defaultdict.
        result = copy.copy(container)
        result.update(zip(container, parts, strict=True))
        return result
    if isinstance(container, Mapping):
        return dict(zip(container, parts, strict=True))
    if is_record(container):
        result = copy.copy(container)
        for name, part in zip(record_parts(container), parts, strict=True):
            object.__setattr__(result, name, part)  # a frozen one, too
        return result
    if isinstance(container, _NamedTuple):
        return container._make(parts)
    return type(container)(parts)


@runtime_checkable
class _NamedTuple(Protocol):
    """What tells a named tuple from a tuple: its constructor takes the fields one by one."""

    def _make(self, iterable: Iterable[Any], /) -> Any: ...
