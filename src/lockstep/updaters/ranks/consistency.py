"""Check that the ranks of a run agree: completely when the run begins, and part by part while it goes on.

Recipes hold the names of functions. A loss function with another body, a patched `forward` or another class of the same
name would give each rank gradients of its own, and their sum would be that of no program. So the bytecode and constants
under the same names are compared, without files and line numbers. Only names that both ranks have are compared, since
one rank may have more: a hook that logs, for example. Values are not compared, neither those that a function closes
over nor defaults, because a rank or a clock may be among them; an audited update compares what they compute.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses import FakeTensor

from lockstep.communicators import (
    Communicator,
    Difference,
    StateComparer,
    check_fields,
    compare,
    gather,
    kernel_class,
    self_test,
)
from lockstep.data import BatchIterator
from lockstep.digest import fingerprint
from lockstep.errors import DisagreementError
from lockstep.replicas import SINGLE_THREAD, ComputeMode, held_tensors, hooks_of
from lockstep.updaters.detectors import functions_in, outside_tensors
from lockstep.updaters.loss import BatchLoss, Supervised
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.recipe_fields import name_of, recipe_fields, settings_of
from lockstep.updaters.state.training import TrainingState

LOG = logging.getLogger("lockstep")

KERNELS_REMEDY: Final = "Kernels that differ round differently. Run all ranks on one type of machine and installation."
CODE_REMEDY: Final = "Run the same script with the same arguments and seeds on every rank."
MODELS_REMEDY: Final = "Build the model from the same seed on every rank, or leave out `differing_models='refuse'`."
OUTSIDE_REMEDY: Final = (
    "Create it from the same seed on every rank, by torch.manual_seed before; or make it a buffer or a module of the "
    "model, or pass its module as one of several models, which begin with the values of rank 0."
)


class RankConsistency:
    """Compares everything that must be equal on all ranks.

    Args:
        communicator: The communicator of the run.
        training: The training state.
        recipe: The arguments of the updater.
    """

    def __init__(self, communicator: Communicator, training: TrainingState, recipe: Recipe) -> None:
        self._communicator = communicator
        self._training = training
        self._recipe = recipe
        self._comparer = StateComparer(training.tensors, communicator.check_every)
        self._is_checked = False

    def check_start(self) -> None:
        """Compare everything, before the first update and again after a state was loaded.

        Raises:
            DisagreementError: On every rank, if ranks differ; it names the difference and the rank.
        """
        if self._is_checked:
            return
        check_fields(self._communicator, self._kernels(), what="kernel class", remedy=KERNELS_REMEDY)
        check_fields(self._communicator, describe_run(self._training, self._recipe), what="recipe", remedy=CODE_REMEDY)
        check_code(self._communicator, describe_code(self._training, self._recipe))
        self._compare_state()
        outside = _fingerprints(self._outside())
        check_fields(
            self._communicator, outside, what="tensors beside its parameters and buffers", remedy=OUTSIDE_REMEDY
        )
        # Set only after all comparisons have passed, so that an update after an error compares again.
        self._is_checked = True

    def state_loaded(self) -> None:
        """Request a full comparison before the next update, because the state was replaced."""
        self._is_checked = False
        self._comparer.forget()

    def state_digest(self) -> str:
        """Return the digest of the part of the state that is due in this update."""
        return self._comparer.digest_at(self._training.iteration)

    def check_digests(self, digests: Sequence[str]) -> None:
        """Check that the digests of all ranks are equal.

        Args:
            digests: The digest of each rank.

        Raises:
            DisagreementError: On every rank, if they differ; it names the rank, the tensor and the update.
        """
        # Every rank has the same digests, so all of them enter the collective search for the difference, or none does.
        if len(set(digests)) > 1:
            raise self._comparer.explain(self._communicator, self._training.iteration)

    def _kernels(self) -> Fields:
        """Describe the kernels of this rank, with the results they give for a few numbers."""
        devices = list(dict.fromkeys(self._training.replicas.devices))
        fields = kernel_class(devices)
        # In the settings of an update: other numbers of intra-op threads would give other bits than the shards have.
        with ComputeMode(SINGLE_THREAD):
            tests = [self_test(device) for device in devices]
        for name in tests[0]:
            fields[name] = " ".join(sorted({test[name] for test in tests}))
        return fields

    def _compare_state(self) -> None:
        """Compare all tensors of the state; a fresh run may take the models of rank 0 where they differ."""
        difference = self._difference()
        if difference is None:
            return
        # Models differ by their seeds only before the first update. Later, a difference means that the ranks computed
        # different things, and copying one of them would hide that.
        if self._training.iteration or self._communicator.differing_models == "refuse":
            raise difference
        LOG.info("The models of the ranks differ (%s). All ranks now use the models of rank 0.", difference.subject)
        self._broadcast_models()
        # Only models were sent. Optimizer state that still differs is refused.
        difference = self._difference()
        if difference is not None:
            raise difference

    def _broadcast_models(self) -> None:
        """Copy the models of rank 0 to all ranks."""
        model = self._training.replicas.model
        named = self._training.tensors()
        # Sent in the order of names, which is the same on all ranks; the order of registration need not be.
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._communicator.broadcast([tensor for tensor in named.values() if id(tensor) in own])
        # Master weights are copies of the weights that have just been replaced.
        for masters in self._training.masters.values():
            masters.refresh()

    def _difference(self) -> DisagreementError | None:
        """Find the first tensor in which a rank differs from rank 0."""
        found = compare(self._communicator, _fingerprints(self._training.tensors()))
        what = "parameters, buffers and optimizer state"
        return None if found is None else found.error(what=what, remedy=MODELS_REMEDY)

    def _outside(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name that the model and the loss function hold beside what is trained."""
        model = self._training.replicas.model
        named = outside_tensors(model, ()) | outside_tensors(self._recipe.loss_fn, [model])
        known = {id(each) for each in (*named.values(), *self._training.tensors().values())}
        for index, tensor in enumerate(held_tensors(model)):
            if id(tensor) not in known:
                named[f"tensor {index} of shape {tuple(tensor.shape)}"] = tensor
        own = {id(each) for each in (*model.parameters(), *model.buffers())}
        # Nodes of an exported graph hold tensors without values.
        has_values = [name for name, each in named.items() if not each.is_meta and not isinstance(each, FakeTensor)]
        return {name: named[name] for name in has_values if id(named[name]) not in own}


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Fields:
    return {name: fingerprint([tensor]).hex() for name, tensor in tensors.items()}


Fields = dict[str, str]
"""Descriptions by name."""


def describe_run(training: TrainingState, recipe: Recipe) -> Fields:
    """Describe the current state of a run, for comparison between ranks: its recipe, and how far it has come.

    Args:
        training: The training state.
        recipe: The arguments of the updater.
    """
    described = recipe_fields(recipe, settings_of(training), training.models, num_shards=recipe.num_shards or 0)
    described |= {"max_skipped": recipe.max_skipped, "loss_scale state": training.loss_scale.state_dict()}
    described |= {f"epoch of iterator {name!r}": each.epoch_detail for name, each in training.iterators.items()}
    for name, model in training.models.items():
        evaluating = [path for path, module in model.named_modules() if not module.training]
        described[f"modules of {name!r} in evaluation mode"] = evaluating
    texts = {f"`{name}`": repr(value) for name, value in described.items()}
    return {"number of updates": str(training.iteration), **texts}


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
