"""Replace what deepcopy leaves as it is: functions and weak references that refer to the original model."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def copy_references(model: nn.Module, memo: dict[int, Any]) -> None:
    """Replace functions and weak references in a copy of a model by those that refer to the copy.

    Deepcopy leaves both as they are: a hook that is defined in ``__init__`` would store on the original, and a layer
    would read from its original parent.

    Args:
        model: The original.
        memo: The memo of the deepcopy. Receives the copies of functions and of their cells.
    """
    for module in model.modules():
        copied: Any = memo.get(id(module))
        held: list[tuple[Any, Any]] = [] if copied is None else [(vars(module), vars(copied))]
        # Hooks, and functions in lists and dicts.
        parts = [each for each in vars(module).values() if type(each) in {dict, OrderedDict, list}]
        held += [(each, memo[id(each)]) for each in parts if id(each) in memo]
        for before, after in held:
            for key, value in list(before.items() if isinstance(before, dict) else enumerate(before)):
                own = after.get(key) if isinstance(after, dict) else after[key]
                # Another object was made by the module itself, or by deepcopy, which copies a partial but no function.
                if own is value or (type(own) is partial is type(value) and own.func is value.func):
                    after[key] = _referring(own, memo)


def _referring(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function or a weak reference that refers to copies where a memo has them; anything else as it is.

    A partial function is copied in any case, as deepcopy does.
    """
    if type(value) in weakref.ProxyTypes:
        # A proxy tells what it refers to by a method of that alone.
        target = memo.get(id(value.__repr__.__self__))
        return value if target is None else weakref.proxy(target)
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is weakref.ref:
        target = memo.get(id(value()))
        return value if target is None else weakref.ref(target)
    if type(value) is MethodType:
        target = memo.get(id(value.__self__))
        return value if target is None else MethodType(value.__func__, target)
    if type(value) is partial:
        function, *args = (_referring(each, memo) for each in (value.func, *value.args))
        return partial(function, *args, **{name: _referring(each, memo) for name, each in value.keywords.items()})
    return _function_referring(value, memo) if type(value) is FunctionType else value


def _function_referring(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a copy of a function whose closure and defaults refer to copies, or the function if there are none."""
    memo[id(function)] = function  # it may refer to itself
    cells, named = function.__closure__ or (), function.__kwdefaults__ or {}
    defaults = (*(function.__defaults__ or ()), *named.values())
    own = tuple(_cell_referring(cell, memo) for cell in cells)
    values = tuple(_referring(each, memo) for each in defaults)
    if all(map(operator.is_, (*own, *values), (*cells, *defaults))):
        return function
    positional = values[: len(values) - len(named)]
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, positional, own)
    copied.__kwdefaults__ = dict(zip(named, values[len(positional) :], strict=True))
    memo[id(function)] = update_wrapper(copied, function)
    return copied


def _cell_referring(cell: CellType, memo: dict[int, Any]) -> CellType:
    """Return a cell of a closure that holds the copy of what another one holds, or that cell if there is no copy."""
    if id(cell) not in memo:
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            return cell
        copied = _referring(held, memo)
        # Functions that share a cell share its copy.
        memo[id(cell)] = cell if copied is held else CellType(copied)
    found: CellType = memo[id(cell)]
    return found
