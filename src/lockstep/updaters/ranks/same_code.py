"""Check that ranks run the same code under the same names: bytecode and constants, without files and line numbers.

Recipes hold the names of functions. A loss function with another body, a patched `forward` or another class of the same
name would give each rank gradients of its own, and their sum would be that of no program.

Only names that both ranks have are compared, since one rank may have more: a hook that logs, for example. Values are
not compared, neither those that a function closes over nor defaults, because a rank or a clock may be among them; an
audited update compares what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Any, Final

from torch import nn

from lockstep.communicators import Communicator, Difference, gather
from lockstep.data import BatchIterator
from lockstep.replicas import hooks_of
from lockstep.updaters.detectors import functions_in
from lockstep.updaters.loss import BatchLoss, Supervised
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.recipe_fields import name_of
from lockstep.updaters.state.training import TrainingState

CURE: Final = (
    "Start every rank from the same files, and patch functions on all ranks or on none. To change what a rank logs or "
    "measures, give what it adds a name of its own."
)
BYTECODE: Final = "bytecode of Python"
STEP_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OF_TORCH: Final = ("forward", "step")
"""The methods of PyTorch's own classes that are compared, which have the version of PyTorch in common."""

Code = dict[str, list[str]]
"""The digests of functions by their names, of which several functions may have one."""


def check_code(communicator: Communicator, own: Mapping[str, list[str]]) -> None:
    """Check that every rank has the code of rank 0 under the names that both have.

    Ranks whose versions of Python have other bytecode are not compared.

    Args:
        communicator: The communicator that connects the ranks.
        own: The code of this rank.

    Raises:
        DisagreementError: On every rank, if the code differs. It names the rank and the functions.
    """
    found = gather(communicator, own)
    if found is None or any(each[BYTECODE] != found[0][BYTECODE] for each in found):
        return
    first = found[0]
    for rank, here in enumerate(found):
        names = tuple(name for name in first if name in here and not _fits(set(here[name]), set(first[name])))
        if names:
            texts, texts_0 = ({name: f"code {', '.join(each[name])}" for name in names} for each in (here, first))
            raise Difference(rank, texts, texts_0, names).error(what="code", remedy=CURE)


def _fits(here: set[str], first: set[str]) -> bool:
    # Functions of one name, such as lambdas, may be more on one rank.
    return here <= first or first <= here


def describe_code(training: TrainingState, recipe: Recipe) -> Code:
    """Return the digests of the functions that an update calls, by name.

    Args:
        training: The training state.
        recipe: The arguments of the updater.
    """
    found: dict[str, set[str]] = {}
    for name, code in _named_code(training, recipe):
        if not code.co_filename.startswith("<"):  # what is made while a program runs may contain the name of a device
            found.setdefault(name, set()).add(hashlib.sha256(_text(code).encode()).hexdigest()[:16])
    return {BYTECODE: [MAGIC_NUMBER.hex()], **{name: sorted(digests) for name, digests in found.items()}}


def _named_code(training: TrainingState, recipe: Recipe) -> Iterator[tuple[str, CodeType]]:
    for argument in ("loss_fn", "step_fn", "converter"):
        yield from _of_callable(f"`{argument}`", getattr(recipe, argument))
    for path, module in [pair for model in training.models.values() for pair in model.named_modules()]:
        yield from _of_class(type(module))
        yield from _of_callable(f"`forward` of module {path!r}", vars(module).get("forward"))
        for hook in hooks_of(module):
            yield from _of_callable(f"hook of module {path!r}", hook)
    for optimizer in training.optimizers.values():
        yield from _of_class(type(optimizer))
        for hook in (each for name in STEP_HOOKS for each in vars(optimizer).get(name, {}).values()):
            yield from _of_callable("hook of an optimizer", hook)
    for scheduler in training.schedulers.values():
        yield from _of_class(type(scheduler))
    for iterator in training.iterators.values():
        yield from _of_class(type(iterator.dataset if isinstance(iterator, BatchIterator) else iterator))


def _of_callable(role: str, value: Any) -> Iterator[tuple[str, CodeType]]:
    """Yield the code of a function, or of the class of an object that is called, with the names in errors."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, BatchLoss):
        yield from _of_callable(f"`forward` of {role}", value.forward)
    if isinstance(value, BatchLoss | Supervised):
        yield from _of_callable(f"`criterion` of {role}", value.criterion)
    functions = functions_in(value)
    for function in functions:
        yield f"{role} {name_of(value)}", function.__code__
    if not functions:
        for module in value.modules() if isinstance(value, nn.Module) else [value]:
            yield from _of_class(type(module))


def _of_class(kind: type) -> Iterator[tuple[str, CodeType]]:
    """Yield the code of all methods of a class and of its bases."""
    for base in kind.__mro__[:-1]:
        of_torch = base.__module__.partition(".")[0] == "torch"
        for name, value in list(vars(base).items()):
            if not of_torch or name in OF_TORCH:
                for function in functions_in(value):
                    yield f"`{base.__qualname__}.{name}`", function.__code__


def _text(code: CodeType) -> str:
    """Return a text of code that is equal in every process with the same bytecode."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return f"{code.co_code!r} {names} {counts} {_constant(code.co_consts)}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _text(value)
    if isinstance(value, tuple | frozenset):
        parts = list(map(_constant, value))
        # The order of a set depends on hashes, which differ between processes.
        return f"{type(value).__name__} {parts if isinstance(value, tuple) else sorted(parts)}"
    return f"{type(value).__name__} {value!r}"
