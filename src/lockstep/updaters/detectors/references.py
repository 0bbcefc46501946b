"""Find what a function or an object refers to, without running code of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dis import get_instructions
from functools import partial
from inspect import getattr_static
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Final, TypeVar

T = TypeVar("T")

MOST_TRIES: Final = 100
"""The number of times that a container is read which other threads change meanwhile."""


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

    Args:
        value: The object.
    """
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            # A member without a value is no attribute.
            with suppress(AttributeError):
                if type(member) is MemberDescriptorType and name != "__dict__":
                    found[name] = member.__get__(value)
    held = getattr_static(value, "__dict__", None)
    if type(held) in (GetSetDescriptorType, MemberDescriptorType):
        own = held.__get__(value)
        found.update(listed(lambda: dict.items(own)) if isinstance(own, dict) else ())
    return found


def references(value: Any) -> list[object]:
    """Return the objects that a function, a method, a partial or a callable object refers to directly.

    Args:
        value: The function or object.
    """
    if type(value) is partial:
        return [*references(value.func), *value.args, *value.keywords.values()]
    if type(value) is MethodType:
        return [*references(value.__func__), *attributes(value.__self__).values()]
    if type(value) is FunctionType:
        return [each for _, each in of_function(value)]
    return [*attributes(value).values()]


def defining_modules(values: Iterable[object]) -> list[str]:
    """Return the names of the modules that define functions, the classes of other objects, and what both refer to.

    Args:
        values: The functions and objects.
    """
    held = [found for each in values for found in (each, *references(each))]
    # Compared by type, so that no code of the user runs.
    return list(dict.fromkeys((each if type(each) is FunctionType else type(each)).__module__ for each in held))


def of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values of a function's closure, of its defaults, and of the global variables that it names.

    Args:
        function: The function, of which functions inside of it are a part.

    Yields:
        Names of variables and their values. Variables without a value are left out.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A variable that has no value yet has an empty cell.
        with suppress(ValueError):
            yield name, cell.cell_contents
    for name in dict.fromkeys(names_in(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    arguments, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function and of the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from names_in(constant)


def compares_objects(code: CodeType) -> bool:
    """Return whether code, or that of a function inside of it, compares two objects by ``is`` or ``in``.

    A comparison with a constant, as in ``x is None`` or ``"aux" in outputs``, does not count.

    Args:
        code: The code of a function.
    """
    before: list[str] = []
    for instruction in get_instructions(code):
        if instruction.opname in ("IS_OP", "CONTAINS_OP") and not any("CONST" in each for each in before[-2:]):
            return True
        before.append(instruction.opname)
    return any(compares_objects(constant) for constant in code.co_consts if type(constant) is CodeType)
