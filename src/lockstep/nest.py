"""Traverse nested batches: tuples, lists, dicts, named tuples and dataclasses that contain tensors.

Models accept and return such nests, and code that splits or moves a batch must reach every tensor in it. Containers
keep their types. A value that is neither a container nor a tensor is passed through unchanged. A tensor is named by the
Python expression that leads to it, such as ``batch['image'][0]``. What other objects hold is read by `attributes`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import suppress
from inspect import getattr_static
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")

MOST_TRIES: Final = 100
"""The number of times that a container is read which other threads change meanwhile."""
NO_ATTRIBUTES: Final = frozenset({"__dict__", "__vectorcalloffset__"})
"""Members of objects that are no attributes: the dict that holds these, and an address that calls may change."""


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Apply a function to every tensor and return the results in containers of the same types.

    Args:
        function: The function to call with each tensor.
        nest: The nest to traverse. It is not modified.

    >>> map_tensors(len, {"x": torch.zeros(3, 2), "pair": (torch.zeros(4), "a name")})
    {'x': 3, 'pair': (4, 'a name')}
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    parts = parts_of(nest)
    if parts is None:
        return nest
    # Most parts are tensors, and are not worth a call of this function.
    return rebuild(
        nest, [function(part) if isinstance(part, torch.Tensor) else map_tensors(function, part) for part in parts]
    )


def parts_of(nest: Any) -> Collection[Any] | None:
    """Return the contents of a container in order, or None if it is not one.

    Args:
        nest: The container.

    >>> list(parts_of({"x": 1, "y": 2})), parts_of("xy")
    ([1, 2], None)
    """
    # Tuples and mappings come before dataclasses: a subclass of dict or tuple may also be decorated as a dataclass.
    # Tuples come first: finding out whether something is a mapping takes several times as long.
    if isinstance(nest, (tuple, list)):
        return nest
    if isinstance(nest, Mapping):
        return nest.values()
    return record_parts(nest).values() if is_record(nest) else None


def has_tensor(nest: Any) -> bool:
    """Return whether a nest contains a tensor.

    Args:
        nest: The nest to traverse.

    >>> has_tensor(("a name", [torch.zeros(3)])), has_tensor(["a name"])
    (True, False)
    """
    return isinstance(nest, torch.Tensor) or any(map(has_tensor, parts_of(nest) or ()))


def cut_values(nest: Any, part: range, counts: Callable[[str, Any], bool], name: str = "") -> Any:
    """Return a run of samples of every list, tuple and array without tensors that has one entry per sample.

    Other values are passed through unchanged. Arrays are copied, so that in-place changes stay in the result.

    Args:
        nest: The nest to traverse. Its tensors are passed through unchanged.
        part: The samples to keep.
        counts: Called with the name and the value of each list, tuple or array without tensors, and of each number;
            returns whether it has one entry per sample. The values in a container that has not are traversed.
        name: The name of the nest; empty for a batch, whose entries are named by their positions or keys.

    >>> batch = (["a", "b", "c"], {"scale": 2.0, "sizes": [7, 8]})
    >>> cut_values(batch, range(1, 3), lambda name, value: isinstance(value, list) and len(value) == 3)
    (['b', 'c'], {'scale': 2.0, 'sizes': [7, 8]})
    """
    if isinstance(nest, torch.Tensor):
        return nest
    parts = named_parts(nest, name)
    shape = getattr(nest, "shape", ()) if parts is None else ()
    is_array = isinstance(shape, tuple) and shape != ()
    if is_array or (type(nest) in (list, tuple) and not has_tensor(nest)):
        kept = nest[part.start : part.stop : part.step] if counts(name, nest) else nest
        if is_array:
            return copy.copy(kept)
        if kept is not nest:
            return kept
    if type(nest) in (int, float):
        counts(name, nest)
    return nest if parts is None else rebuild(nest, [cut_values(each, part, counts, path) for path, each in parts])


def tensors(nest: Any) -> list[torch.Tensor]:
    """List every tensor, in the order in which the containers hold them.

    Args:
        nest: The nest to traverse.

    >>> [len(tensor) for tensor in tensors({"x": torch.zeros(3), "pair": (torch.zeros(4), "a name")})]
    [3, 4]
    """
    if isinstance(nest, torch.Tensor):
        return [nest]
    return [tensor for _, tensor in named_tensors(nest)]


def named_tensors(nest: Any, name: str = "batch") -> list[tuple[str, torch.Tensor]]:
    """List every tensor together with its path.

    Args:
        nest: The nest to traverse.
        name: The name of the nest, with which every path starts.

    >>> [path for path, _ in named_tensors({"x": torch.zeros(3), "pair": (torch.zeros(4), "a name")})]
    ["batch['x']", "batch['pair'][0]"]
    """
    if isinstance(nest, torch.Tensor):
        return [(name, nest)]
    found = named_parts(nest, name) or []
    for _, part in found:
        if not isinstance(part, torch.Tensor):
            return [pair for path, part in found for pair in named_tensors(part, path)]
    return found


def named_parts(nest: Any, name: str) -> list[tuple[str, Any]] | None:
    """Return the contents of a container with their names, in the order of `parts_of`, or None if it is not one."""
    if isinstance(nest, (tuple, list)):
        return [(f"{name}[{index}]" if name else str(index), part) for index, part in enumerate(nest)]
    if isinstance(nest, Mapping):
        return [(f"{name}[{key!r}]" if name else str(key), part) for key, part in nest.items()]
    if is_record(nest):
        return [(f"{name}.{key}", part) for key, part in record_parts(nest).items()]
    return None


def is_record(nest: Any) -> bool:
    """Return whether an object is an instance of a dataclass, which is treated as a container of its fields.

    Args:
        nest: The object.
    """
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def record_parts(record: Any) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass by name, without fields that were never set.

    Args:
        record: The instance.
    """
    names = [each.name for each in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def rows(nest: Any) -> int:
    """Return the common length of all tensors along their first dimension, which is the number of samples.

    Args:
        nest: A nest with at least one tensor.

    Raises:
        ValueError: If there is no tensor, a tensor has no dimension, or two tensors differ in length. The message names
            them.

    >>> rows((torch.zeros(4, 2), {"y": torch.zeros(4)}))
    4
    """
    first = ""
    length = -1
    for path, tensor in named_tensors(nest):
        if not tensor.dim():
            raise ValueError(f"`{path}` must have a dimension 0 to count samples by, got shape ().")
        if length < 0:
            first, length = path, tensor.size(0)
        elif tensor.size(0) != length:
            rule = f"must be as long as `{first}` along dimension 0 ({length})"
            raise ValueError(f"`{path}` {rule}, got {tensor.size(0)}.")
    if length < 0:
        raise ValueError("`batch` must hold at least one tensor, got none.")
    return length


def rebuild(container: Any, parts: Iterable[Any]) -> Any:
    """Create a container of the same type as the given one, with other contents in the same order.

    Args:
        container: The container to imitate. It is not modified.
        parts: The new contents, one for each entry of the container.

    >>> rebuild({"x": 1, "y": 2}, [10, 20])
    {'x': 10, 'y': 20}
    """
    if type(container) is tuple or type(container) is list:
        return type(container)(parts)
    # A copy keeps what a call of the constructor would lose, such as the default of a defaultdict.
    if isinstance(container, MutableMapping):
        result = copy.copy(container)
        # Not by `update`, which the outputs of models of transformers forbid.
        for key, part in zip(list(container), parts, strict=True):
            result[key] = part
        return result
    if isinstance(container, Mapping):
        return dict(zip(container, parts, strict=True))
    if is_record(container):
        result = copy.copy(container)
        for name, part in zip(record_parts(container), parts, strict=True):
            # `setattr` would fail for a frozen dataclass.
            object.__setattr__(result, name, part)
        return result
    # A named tuple, whose constructor takes the fields one by one.
    if hasattr(container, "_make"):
        return container._make(parts)
    return type(container)(parts)


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a batch to call arguments: a tuple or list by position, a dict by name, else the only argument.

    Args:
        batch: The tensors of a batch or a shard.

    >>> call_arguments({"x": 1}), call_arguments((1, 2))
    (((), {'x': 1}), ((1, 2), {}))
    """
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def listed(read: Callable[[], Iterable[T]]) -> list[T]:
    """Return what a container holds, or nothing if other threads change it whenever it is read.

    Args:
        read: Returns a new iterable over the container.
    """
    for _ in range(MOST_TRIES):
        # Raised if the size has changed in the meantime.
        with suppress(RuntimeError):
            return list(read())
    return []


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those that have no place in its dict, but no properties.

    Of a method these are the function and the object, of a `functools.partial` also the arguments.

    Args:
        value: The object.
    """
    if issubclass(type(value), type):
        # The entry "__dict__" of a class is that of its instances.
        return dict(type.__getattribute__(value, "__dict__"))
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if type(member) is MemberDescriptorType and name not in NO_ATTRIBUTES:
                # A member without a value is no attribute.
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    held = getattr_static(value, "__dict__", None)
    if type(held) in (GetSetDescriptorType, MemberDescriptorType):
        own = held.__get__(value)
        found.update(listed(lambda: dict.items(own)) if isinstance(own, dict) else ())
    return found
