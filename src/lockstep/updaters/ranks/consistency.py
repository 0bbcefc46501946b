"""Keep the ranks of a run alike: compared when it begins, and again and again while it goes on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep._version import __version__
from lockstep.communicators import Communicator, StateComparer, check_fields, compare, kernel_class, self_test
from lockstep.data import BatchIterator, Iterator as BatchSource
from lockstep.digest import fingerprint
from lockstep.errors import DisagreementError
from lockstep.replicas import SINGLE_THREAD, ComputeMode
from lockstep.updaters.setup import Recipe
from lockstep.updaters.state import Training

LOG = logging.getLogger("lockstep")

Differing = Literal["broadcast", "refuse"]
"""What is done about models that differ when a run begins."""

SAME_KERNELS: Final = "Other kernels round differently: run all processes on one kind of machine and installation."
SAME_CODE: Final = "Run the same script with the same arguments and seeds on every rank."
SAME_SEED: Final = "Build the model from the same seed on every rank, or let rank 0's be broadcast."


class RankConsistency:
    """Compares what must be alike on all ranks.

    Args:
        communicator: Joins them.
        training: What is trained.
        recipe: Describes the run.
        every: Within how many updates all tensors of the state are compared.
        differing: What is done about models that differ when a fresh run begins.
    """

    def __init__(
        self,
        communicator: Communicator,
        training: Training,
        recipe: Callable[[], Fields],
        *,
        every: int,
        differing: Differing,
    ) -> None:
        self._communicator = communicator
        self._training = training
        self._recipe = recipe
        self._differing: Differing = differing
        self._watch = StateComparer(training.tensors, every)
        self._begun = False

    def begin(self) -> None:
        """Compare everything, before the first update and again when a state was loaded.

        Raises:
            DisagreementError: On every rank; it names what differs, and on which rank.
        """
        if self._begun:
            return
        check_fields(self._communicator, self._kernels(), what="kernel class", remedy=SAME_KERNELS)
        check_fields(self._communicator, self._recipe(), what="recipe", remedy=SAME_CODE)
        self._compare_state()
        self._begun = True

    def state_loaded(self) -> None:
        """Compare everything before the next update: the state is another now."""
        self._begun = False
        self._watch.forget()

    def digest(self) -> str:
        """Give the digest of the part of the state whose turn it is."""
        return self._watch.part_of(self._training.iteration)

    def check(self, digests: Sequence[str]) -> None:
        """Refuse to go on where the digests of the ranks differ.

        Raises:
            DisagreementError: On every rank; it names the rank, the tensor and the update.
        """
        if len(set(digests)) > 1:
            raise self._watch.explain(self._communicator, self._training.iteration)

    def _kernels(self) -> Fields:
        """Describe the kernels of this rank, and what they make of a few numbers."""
        devices = list(dict.fromkeys(self._training.group.devices))
        fields = kernel_class(devices)
        with ComputeMode(SINGLE_THREAD):
            tests = [self_test(device) for device in devices]
        for name in tests[0]:
            fields[name] = " ".join(sorted({test[name] for test in tests}))
        return fields

    def _compare_state(self) -> None:
        """Compare all tensors; in a fresh run take rank 0's models where they differ, if that is wanted."""
        difference = self._difference()
        if difference is None:
            return
        if self._training.iteration or self._differing == "refuse":
            raise difference
        LOG.info("The models of the ranks differ (%s): all take rank 0's.", difference.subject)
        self._take_rank_0()
        difference = self._difference()
        if difference is not None:
            raise difference

    def _take_rank_0(self) -> None:
        model = self._training.group.model
        named = self._training.tensors()
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._communicator.broadcast([tensor for tensor in named.values() if id(tensor) in own])
        for masters in self._training.masters.values():
            masters.refresh()

    def _difference(self) -> DisagreementError | None:
        """Find the first tensor in which a rank differs from rank 0."""
        found = compare(
            self._communicator,
            {name: fingerprint([tensor]).hex() for name, tensor in self._training.tensors().items()},
        )
        what = "parameters, buffers and optimizer state"
        return None if found is None else found.error(what=what, remedy=SAME_SEED)


Fields = dict[str, str]
"""Text by name."""


def describe_run(training: Training, recipe: Recipe) -> Fields:
    """Describe a run as it stands."""
    return {
        "lockstep": __version__,
        **{f"`{each.name}`": _text(getattr(recipe, each.name)) for each in fields(recipe)},
        "loss scale": f"{type(training.loss_scale).__name__} {training.loss_scale.state_dict()}",
        "number of updates": f"{training.iteration}",
        **_joined("model", training.models, _model_fields),
        **_joined("optimizer", training.optimizers, _optimizer_fields),
        **_joined("iterator", training.iterators, _iterator_fields),
        **_joined("scheduler", training.schedulers, _kind_field),
        **_joined("epoch scheduler", training.epoch_schedulers, _kind_field),
    }


def _joined(what: str, named: Mapping[str, Any], describe: Any) -> Fields:
    """Describe things of one kind, each field under the thing's name."""
    return {f"{field} of {what} {name!r}": text for name, each in named.items() for field, text in describe(each)}


def _model_fields(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        yield f"kind of module {path!r}", f"{type(module).__name__}{'' if module.training else ' (eval)'}"
    for name, parameter in model.named_parameters():
        trained = "" if parameter.requires_grad else " (frozen)"
        yield f"parameter {name!r}", f"{_shape(parameter)}{trained}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", _shape(buffer)


def _shape(tensor: torch.Tensor) -> str:
    return "of unknown shape" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def _optimizer_fields(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    yield from _kind_field(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        yield f"number of parameters in group {index}", f"{len(group['params'])}"
        for key in sorted(group.keys() - {"params"}):
            yield f"{key!r} in group {index}", _text(group[key])


def _iterator_fields(iterator: BatchSource) -> Iterator[tuple[str, str]]:
    yield from _kind_field(iterator)
    yield "epoch", f"{iterator.epoch_detail}"
    if isinstance(iterator, BatchIterator):
        yield "number of samples", f"{len(iterator.dataset)}"
        for name in ("batch_size", "shuffle", "repeat", "last_batch", "seed", "sample_streams"):
            yield f"`{name}`", f"{vars(iterator)[name]!r}"


def _kind_field(thing: object) -> Iterable[tuple[str, str]]:
    return [("kind", type(thing).__name__)]


def _text(value: object) -> str:
    """Write a value so that equal ones read alike in every process: no addresses."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if inspect.isroutine(value):
        return value.__qualname__
    return type(value).__name__
