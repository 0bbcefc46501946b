"""Notice what a result depends on beside the model: what functions refer to, attributes, generators, varying steps.

What functions refer to is found without running code of their classes.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dis import get_instructions
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, warn
from lockstep.nest import attributes, listed
from lockstep.streams import python_states, restored_generators
from lockstep.updaters.loss import BatchLoss, Supervised
from lockstep.updaters.setup.names import NamedLoss


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


HOLDERS: Final[Mapping[type, str]] = {
    FunctionType: "__wrapped__",
    property: "fget",
    **dict.fromkeys((MethodType, staticmethod, classmethod), "__func__"),
    **dict.fromkeys((partial, cached_property), "func"),
}
"""The attributes in which objects of these types hold a function."""


def functions_in(value: Any) -> list[FunctionType]:
    """Return the function that a value is, and those that a method, a property, a partial or a decorator has inside.

    Args:
        value: The value.
    """
    found: list[Any] = []
    while type(value) in HOLDERS and value not in found:
        found.append(value)
        value = getattr(value, HOLDERS[type(value)], None)
    return [each for each in found if type(each) is FunctionType]


def code_of(function: Any) -> object:
    """Return the code of a function, also inside of a method or a partial, which one that is defined anew shares.

    That of another callable object is the object itself.

    Args:
        function: The function or callable object.
    """
    return next((each.__code__ for each in functions_in(function)), function)


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield code and that of the functions and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from with_inner(constant)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function and of the functions inside of it."""
    for each in with_inner(code):
        yield from each.co_names


def compares_objects(code: CodeType) -> bool:
    """Return whether code, or that of a function inside of it, compares two objects by ``is`` or ``in``.

    A comparison with a constant, as in ``x is None`` or ``"aux" in outputs``, does not count.

    Args:
        code: The code of a function.
    """
    for part in with_inner(code):
        before: list[str] = []
        for instruction in get_instructions(part):
            if instruction.opname in ("IS_OP", "CONTAINS_OP") and not any("CONST" in each for each in before[-2:]):
                return True
            before.append(instruction.opname)
    return False


MOST_FUNCTIONS: Final = 100
"""The number of functions that are looked at most, of those that a loss function calls."""

LOSSES: Final = (Supervised, BatchLoss, NamedLoss)
"""Loss functions of this library that call functions of yours."""


def called_functions(loss_fn: Any) -> Iterable[tuple[Any, list[object]]]:
    """Yield a loss function and the functions that it calls, each with what it refers to.

    Args:
        loss_fn: The loss function.
    """
    kinds = (FunctionType, MethodType, partial, *LOSSES)
    functions = [loss_fn if type(loss_fn) in kinds else type(loss_fn).__call__.__get__(loss_fn)]
    for function in functions:
        found = references(function.__func__ if type(function) is MethodType else function)
        if type(function) is MethodType and type(function.__func__) is FunctionType:
            own = attributes(function.__self__)
            found += [own[name] for name in names_in(function.__func__.__code__) if name in own]
        new = [each for each in found if type(each) in kinds and each not in functions]
        functions += new[: MOST_FUNCTIONS - len(functions)]
        yield function, found


GENERATORS: Final = (
    *("Python's `random`", "`numpy.random`"),
    *("a `torch.Generator` of your own", "a generator of Python or NumPy of your own"),
)
"""The generators whose states are compared."""


def generator_states(functions: Iterable[object], models: Iterable[nn.Module] = ()) -> dict[str, object]:
    """Return the states of generators by name: Python's, that of NumPy if it is imported, and torch's.

    Args:
        functions: Functions and objects, whose own generators count as well, if they refer to them directly, or by a
            function that they call.
        models: The models, of which the generators in attributes count as well.
    """
    held = [each for function in functions for each in references(function)]
    held += [value for each in held if type(each) is FunctionType for value in references(each)]
    held += [value for model in models for each in model.modules() for value in vars(each).values()]
    *_, of_torch, others = GENERATORS
    found, numpy = python_states(), sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.Generator, numpy.random.RandomState)
    found[others] = pickle.dumps([each for each in held if type(each) in kinds])
    found[of_torch] = [each.get_state().tolist() for each in held if type(each) is torch.Generator]
    return found


LIBRARIES: Final = ("torch.", "lockstep.")
"""Beginnings of the modules of optimizers that are known to be repeatable."""

MOST_LEVELS: Final = 3
"""The number of objects at most on the way from the loss function, which is the first, to a tensor or a module."""

MOST_OBJECTS: Final = 10_000
"""The number of objects that are looked at most, so that a large data structure costs little time."""

SEQUENCES: Final = (list, tuple, deque)
OF_MODULES: Final = frozenset(vars(nn.Module()))
"""The attributes of every module, among them those with parameters, buffers and hooks."""

PLAIN: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that are looked at; another type may run code of yours, or have no values yet."""


def states(loss_fn: Any, models: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()) -> dict[str, object]:
    """Return the states by name of what may move while shards are computed: generators, and tensors beside the model.

    Args:
        loss_fn: The loss function.
        models: The model and its replicas.
        optimizers: Optimizers, which may hold what their hooks collect.
    """
    return generator_states([loss_fn], models) | _states_of(
        outside_tensors(loss_fn, models) | tensors_of_own(optimizers, models)
    )


def read_states(functions: Iterable[Any], models: Iterable[nn.Module], *, every: bool = False) -> dict[str, object]:
    """Return the states by name of the tensors beside the model that functions refer to.

    Args:
        functions: The functions.
        models: The model and its replicas.
        every: Whether integers and single elements count as well, and no parameters, which no batch has left.
    """
    found = {name: each for one in functions for name, each in outside_tensors(one, models, every=every).items()}
    return _states_of({name: each for name, each in found.items() if not (every and type(each) is nn.Parameter)})


def left_for(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """List the names of states that have changed or are new.

    >>> left_for({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    ['b', 'c']
    """
    return [name for name, state in after.items() if name not in before or before[name] != state]


def _states_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {
        f"`{name}`": checksum(each)
        for name, each in tensors.items()
        # A tensor whose memory was freed has no values.
        if not each.is_meta and (each.layout is not torch.strided or each.untyped_storage().nbytes())
    }


def tensors_of_own(optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors by name that optimizers refer to that are not PyTorch's or lockstep's.

    Args:
        optimizers: The optimizers.
        models: The model and its replicas, of which nothing is looked at.
    """
    own = [each for each in optimizers if not type(each).__module__.startswith(LIBRARIES)]
    return {name: tensor for each in own for name, tensor in outside_tensors(each, models).items()}


def outside_tensors(loss_fn: Any, models: Iterable[nn.Module], *, every: bool = False) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors that a loss function refers to, by name, such as ``"criterion.center"``.

    No code of yours is run to find them.

    Args:
        loss_fn: The loss function.
        models: The model and its replicas, of which nothing is looked at.
        every: Whether to return integers and single elements as well.
    """
    seen = {id(each) for model in models for each in (*model.modules(), *model.parameters(), *model.buffers())}
    found, most = dict[str, torch.Tensor](), len(seen) + MOST_OBJECTS
    left: list[tuple[str, Any, int]] = [(type(loss_fn).__name__, loss_fn, MOST_LEVELS)]
    while left:
        path, value, levels = left.pop()
        # Types are compared instead of calling isinstance, which asks a proxy for its class and so runs its code.
        kind = type(value)
        if id(value) in seen:
            continue
        if kind in PLAIN:
            # Counters and single elements are left out.
            if not value.is_nested and (every or (value.is_floating_point() and value.numel() > 1)):
                seen.add(id(value))
                found.setdefault(path, value)
        elif kind in LOSSES:
            left += reversed([(name, each, levels) for name, each in attributes(value).items()])
        elif len(seen) < most and (
            issubclass(kind, nn.Module)
            or (
                levels > 0
                and not issubclass(kind, type | ModuleType)
                and (value is loss_fn or not _is_of_library(value))
            )
        ):
            seen.add(id(value))
            registered = _registered(path, value) if issubclass(kind, nn.Module) else []
            held = [(name, each, levels - 1) for name, each in _parts(path, value)]
            left += reversed([(name, each, levels) for name, each in registered] + held)
    return found


def _registered(path: str, module: nn.Module) -> list[tuple[str, Any]]:
    """List the parameters, buffers and submodules of a module, with names."""
    own = attributes(module)
    registries = [own.get(name, {}).items for name in ("_parameters", "_buffers", "_modules")]
    return [(f"{path}.{name}", each) for registry in registries for name, each in listed(registry)]


def _is_of_library(value: Any) -> bool:
    """Check whether a function, or a base of an object's class, was defined in PyTorch or in this package."""
    owners = [value] if type(value) is FunctionType else type(value).__mro__
    return any(str(owner.__module__).split(".")[0] in ("torch", "lockstep") for owner in owners)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a container or any other object refers to directly, with names."""
    kind = type(value)
    if kind is FunctionType:
        yield from of_function(value)
        # Of a function that a decorator has wrapped.
        yield from _parts(path, value.__wrapped__) if "__wrapped__" in vars(value) else ()
    elif kind is MethodType:
        yield type(value.__self__).__name__, value.__self__
        yield from _parts(path, value.__func__)
    elif kind is partial:
        yield path, value.func
        yield from ((f"args[{index}]", each) for index, each in enumerate(value.args))
        yield from value.keywords.items()
    elif issubclass(kind, dict):
        for index, (key, each) in enumerate(listed(lambda: dict.items(value))):
            yield f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[{index}]", each
    elif issubclass(kind, SEQUENCES):
        base = next(each for each in SEQUENCES if issubclass(kind, each))
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(listed(lambda: base.__iter__(value))))
    elif issubclass(kind, nn.Module):
        yield from ((f"{path}.{name}", each) for name, each in attributes(value).items() if name not in OF_MODULES)
    else:
        yield from ((f"{path}.{name}", each) for name, each in attributes(value).items())
        call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
        if type(call) is FunctionType:
            yield path, call


MOST_ELEMENTS: Final = 2**24
"""The number of elements of an optimizer above which it is not copied."""


def warn_of_steps(functions: Iterable[object]) -> None:
    """Step copies of optimizers that are not PyTorch's or lockstep's, and warn if two copies differ.

    Hooks are left out, and so is an optimizer that is too large, or that cannot be copied and stepped alone.

    Args:
        functions: What steps next: optimizers, and hooks, which are not looked at. Gradients are set.
    """
    for optimizer in functions:
        if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith(LIBRARIES):
            continue
        before, found = generator_states([optimizer]), list[list[int]]()
        # It may hold what cannot be copied, or need more than its parameters and their gradients.
        with suppress(Exception), restored_generators():
            steps = [_stepped(optimizer), _stepped(optimizer)]
            # Of generators that have moved another warning tells.
            found = steps if generator_states([optimizer]) == before else []
        if not found or found[0] == found[1]:
            continue
        warn(
            f"The step of {type(optimizer).__name__} has another result when it is made twice from the same weights, "
            "gradients and state: a clock, a counter or a generator of its own decides. Ranks would train on to other "
            "weights, and a resumed run as well. Derive the value from optimizer.state, from a parameter group or from "
            "torch's random numbers.",
            DeterminismWarning,
        )


def _stepped(optimizer: Optimizer) -> list[int]:
    """Return checksums of what a step would make of the parameters, and leave all as it was; none if they are large."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if sum(each.numel() for each in parameters) > MOST_ELEMENTS:
        return []
    memo: dict[int, Any] = {}
    # A scheduler has wrapped `step` of the object.
    held = {name: each for name, each in vars(optimizer).items() if name != "step"}
    copied: Any = object.__new__(type(optimizer))
    vars(copied).update(
        {name: OrderedDict() if name.endswith("_hooks") else deepcopy(each, memo) for name, each in held.items()}
    )
    for each in parameters:
        memo[id(each)].grad = None if each.grad is None else each.grad.clone()
    step: Any = type(optimizer).step
    with torch.random.fork_rng():
        # Below the wrapper that calls the hooks of all optimizers.
        getattr(step, "__wrapped__", step)(copied)
    return [checksum(memo[id(each)].detach()) for each in parameters]
