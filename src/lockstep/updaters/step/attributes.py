"""Notice what a forward leaves in plain attributes of the replicas, because the original model does not get it."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dis import get_instructions
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, few, warn
from lockstep.nest import attributes, listed
from lockstep.replicas import hooks_of
from lockstep.updaters.detectors import (
    OF_MODULES,
    called_functions,
    functions_in,
    names_in,
    of_function,
    with_inner,
)
from lockstep.updaters.result import UpdateResult

VALUES: Final = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS: Final = (dict, list, tuple, set, deque)
MOST_LEVELS: Final = 3
"""The number of containers inside of each other whose contents are compared."""
MOST_CODE: Final = 2_000
"""The number of functions at most whose code is looked at."""

OF_OTHERS: Final = (torch.Tensor, UpdateResult, str, list, dict)
"""The types of objects whose attributes are rather meant where a program reads one of the same name."""

LIBRARIES: Final = ("torch", "lockstep")


class Changed(NamedTuple):
    """A plain attribute that a forward has set or changed.

    Attributes:
        path: The name of the module in the model.
        module: The module of the original model.
        name: The name of the attribute.
    """

    path: str
    module: nn.Module
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def changed_attributes(model: nn.Module, replica: nn.Module) -> list[Changed]:
    """List the plain attributes that a forward has set or changed, also in place.

    Args:
        model: The model as it was.
        replica: A copy of it that has computed shards.
    """
    found = []
    for (path, module), copied in zip(model.named_modules(), replica.modules(), strict=False):
        before = attributes(module)
        for name, value in attributes(copied).items():
            is_plain = name not in OF_MODULES or name == "training"
            if is_plain and value is not before.get(name) and _summary(before.get(name)) != _summary(value):
                found.append(Changed(path, module, name))
    return found


def _summary(value: Any, levels: int = MOST_LEVELS) -> str:
    """Return a text that differs where values differ, as far as values of their type are compared."""
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_meta and not value.is_nested:
        # A tensor whose memory was freed has no values.
        return f"{value.shape} {checksum(value.detach()) if value.untyped_storage().nbytes() else None}"
    if kind in VALUES:
        return repr(value)
    if levels and issubclass(kind, CONTAINERS):
        base = next(each for each in CONTAINERS if issubclass(kind, each))
        items = listed(lambda: dict.items(value) if base is dict else base.__iter__(value))
        found = [_summary(each, levels - 1) for each in items]
        # A copy of a set may have another order.
        return repr(sorted(found) if base is set else found)
    return kind.__qualname__


def warn_of_reads(loss_fn: Any, model: nn.Module, changed: Sequence[Changed]) -> None:
    """Warn of attributes that a forward changes and that your program seems to read from the original model.

    These are metrics of torchmetrics, also those that the loss function updates, and attributes that your program reads
    by name elsewhere than in the loss function and in what a forward calls. Your program is what calls the updater, and
    the functions and classes that it names and that are defined beside it.

    Args:
        loss_fn: The loss function.
        model: The original model.
        changed: The attributes that a forward has changed.
    """
    torchmetrics: Any = sys.modules.get("torchmetrics")
    held: list[Any] = [each for _, found in called_functions(loss_fn) for each in found] if torchmetrics else []
    updated = [each for each in held if issubclass(type(each), torchmetrics.Metric) and each.update_called]
    read = set(_names_read(loss_fn, model)).difference(*map(dir, OF_OTHERS)) if changed or updated else ()
    if updated and "compute" in read:
        warn(
            f"`loss_fn` updates a {type(updated[0]).__name__} of torchmetrics whose value your program seems to "
            "compute. An audit calls the loss function once more for some samples, and each process calls it for its "
            "own samples only, so the value depends on where the program runs. Return its counts as `metrics` of a "
            "lockstep.Loss, or give the metric to an Evaluator.",
            DeterminismWarning,
        )
    metrics = [each.path for each in changed if torchmetrics and isinstance(each.module, torchmetrics.Metric)]
    found = list(dict.fromkeys([*metrics, *(str(each) for each in changed if each.name in read)]))
    if found:
        warn(
            f"Forward changes attributes of the model that your program seems to read elsewhere: {few(found)}. Each "
            "device has a copy of the model with attributes of its own, which the original does not get: between "
            "updates you read there the value from before the run, and what you reset there is not reset in the "
            "copies. Pass the value to lockstep.report in the loss function, or register it as a buffer with a rule "
            "(`buffers`). If your program does not use it, filter this warning.",
            DeterminismWarning,
        )


def _names_read(loss_fn: Any, model: nn.Module) -> Iterator[str]:
    """Yield the names of attributes that a program reads elsewhere than in a loss function and in forwards.

    What methods of other classes than those of the model read of ``self`` is left out.
    """
    methods = _methods_of(model)
    of_model = {function.__code__ for functions in methods.values() for function in functions}
    seen, frame = _used_code(loss_fn, model, methods), inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "__main__" or name.split(".", maxsplit=1)[0] not in {*LIBRARIES, *sys.stdlib_module_names}:
            left = [(frame.f_code, False)]
            for code, in_class in left:  # which grows
                if code not in seen:
                    seen.add(code)
                    yield from _loads(code, without_self=in_class and code not in of_model)
                    left += _mentioned(code, frame.f_globals)
        frame = frame.f_back


def _mentioned(code: CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[CodeType, bool]]:
    """Yield the code inside of other code, and that of the functions and classes of its module that it names.

    Args:
        code: The code.
        variables: The global variables of its module.

    Yields:
        The code of a function or of the body of a class, and whether it is a method.
    """
    is_module = code.co_name == "<module>"
    is_class = not (is_module or code.co_flags & inspect.CO_OPTIMIZED)
    names = {each.argval for each in get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        # What a module defines and does not name is not used by it.
        if type(constant) is CodeType and not (is_module and constant.co_name in variables.keys() - names):
            yield constant, is_class
    for value in [variables[name] for name in names if name in variables]:
        # By type, so that no code of a class runs.
        if issubclass(type(value), type | FunctionType) and value.__module__ == variables.get("__name__"):
            members = vars(value).values() if isinstance(value, type) else [value]
            functions = [function for member in members for function in functions_in(member)]
            yield from ((function.__code__, isinstance(value, type)) for function in functions)


def _loads(code: CodeType, *, without_self: bool) -> Iterator[str]:
    """Yield the names of the attributes that code reads, except for those of its first argument if it is ``self``."""
    own, variable = code.co_varnames[:1] if without_self else (), None
    for each in get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and variable not in own:
            yield str(each.argval)
        # From Python 3.13 on, one instruction may load two variables.
        loaded = each.argval if type(each.argval) is tuple else (each.argval,)
        variable = loaded[-1] if "LOAD_FAST" in each.opname else None


def _methods_of(model: nn.Module) -> dict[str, list[FunctionType]]:
    """Return the methods of the classes of a model's modules by their names."""
    methods: dict[str, list[FunctionType]] = {}
    kinds = {type(module) for module in model.modules()}
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (nn.Module, object)):
        for name, member in vars(base).items():
            methods.setdefault(name, []).extend(functions_in(member))
    return methods


def _used_code(loss_fn: Any, model: nn.Module, methods: Mapping[str, Sequence[FunctionType]]) -> set[CodeType]:
    """Return the code of a loss function, of forwards, and of functions and methods that they call."""
    left = [function for each, _ in called_functions(loss_fn) for function in functions_in(each)]
    # What is read while a model is built has no value of a forward.
    left += [method for name in ("__init__", "forward", "__call__") for method in methods.get(name, ())]
    for module in model.modules():
        held = (*vars(module).values(), *hooks_of(module))
        left += [function for each in held for function in functions_in(each)]
    found = set[CodeType]()
    while left and len(found) < MOST_CODE:
        function = left.pop()
        if function.__code__ not in found:
            found.update(with_inner(function.__code__))
            left += [method for name in {*names_in(function.__code__)} for method in methods.get(name, ())]
            called = [each for _, value in of_function(function) for each in functions_in(value)]
            left += [each for each in called if each.__module__.split(".")[0] not in LIBRARIES]
    return found
