"""Collect what a snapshot holds of an updater, compare its recipe with that of another one, and load it there."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.arguments import check_instance, did_you_mean
from lockstep.communicators import kernel_class
from lockstep.errors import DeterminismWarning, LockstepError, StateError, printable, warn
from lockstep.program import describe_program
from lockstep.snapshots.content import Content, Parent
from lockstep.snapshots.snapshot import Snapshot, read_program
from lockstep.strides import laid_out_for
from lockstep.updaters import CODE, MAIN, UNKNOWN_SHAPE, Updater

USUAL_METADATA = {"version": 1}
"""What PyTorch stores for a module that does not say otherwise. Only other metadata is part of a snapshot."""
MISSING: Final = "nothing"
"""The value that a message shows for a field that one side does not have."""

LISTED: Final = 20
"""The number of fields that a message lists with their values, and of names of a kind that a table lists."""


class Collector:
    """Collects the content of the snapshots of one run.

    Args:
        updater: The updater of the run.
        run_id: The name of the run.
        parent: The snapshot from which the run was resumed.
    """

    def __init__(self, updater: Updater, *, run_id: str, parent: Parent | None = None) -> None:
        self._updater = updater
        self._run_id, self._parent = run_id, parent
        # Read once: it takes longer than a copy of a small model.
        self._kernel_class = kernel_class(updater.devices)
        self._recipe: dict[str, Any] | None = None

    def conditions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the recipe and the kernel class of the run."""
        # After the first update, because lazy parameters have no shape before it.
        if self._recipe is None or self._updater.iteration == 0:
            self._recipe = self._updater.recipe_fields()
        return self._recipe, self._kernel_class

    def collect(self, *, surroundings: Any = None, metrics: Mapping[str, float] | None = None) -> Content:
        """Return the content of a snapshot of now, whose tensors are those that are being trained.

        Args:
            surroundings: The state of what belongs to the run but not to its result.
            metrics: Numbers that describe the snapshot.
        """
        recipe, kernels = self.conditions()
        updater = self._updater
        models, state = _split(updater.live_state())
        return Content(
            progress={
                "update": updater.iteration,
                "applied": state.get("applied_updates"),
                "epoch": updater.epoch,
                "epoch_detail": updater.epoch_detail,
                "samples": updater.samples_passed,
            },
            run_id=self._run_id,
            parent=self._parent,
            recipe=recipe,
            kernel_class=kernels,
            models=models,
            state=state,
            surroundings=surroundings,
            metrics=metrics or {},
        )


def _split(state: dict[str, Any]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Split the state of an updater into the tensors of its models and the rest."""
    models: dict[str, dict[str, torch.Tensor]] = {}
    rest, metadata = {}, {}
    for name, values in state.get("models", {}).items():
        tensors = {each: value for each, value in values.items() if isinstance(value, torch.Tensor)}
        # Extra state of modules, and None for parameters without a shape.
        others = {each: value for each, value in values.items() if each not in tensors}
        models[name], rest[name] = tensors, others
        about = getattr(values, "_metadata", None) or {}
        metadata[name] = {path: dict(each) for path, each in about.items() if each != USUAL_METADATA}
    optimizers = {name: _in_order(each) for name, each in state.get("optimizers", {}).items()}
    replaced = {"models": rest, "optimizers": optimizers} if models else {}
    return models, {**state, **replaced, "metadata": metadata}


def _in_order(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sort the state of an optimizer by parameters: threads may have created its entries in any order."""
    if "masters" in state and "optimizer" in state:
        return {**state, "optimizer": _in_order(state["optimizer"])}
    if "state" not in state:
        return state
    # What belongs to no parameter has a name of the optimizer's own.
    parameters = sorted(index for index in state["state"] if type(index) is int)
    return {**state, "state": {index: state["state"][index] for index in dict.fromkeys([*parameters, *state["state"]])}}


class Change(NamedTuple):
    """A field that differs.

    Attributes:
        name: The name of the field.
        saved: The value in the snapshot, or `MISSING`.
        own: The value of this run, or `MISSING`.
    """

    name: str
    saved: Any
    own: Any

    def __str__(self) -> str:
        inner = [self]
        if isinstance(self.saved, list) and isinstance(self.own, list):
            inner = compare_fields(*(dict(_options(self.name, each)) for each in (self.saved, self.own))) or inner
        texts = [f"{printable(name)} is {own!r} here and {saved!r} in the snapshot" for name, saved, own in inner]
        return "; ".join(texts)


def _options(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options within a field, such as those of each of several schedulers, but not what follows from them."""
    if isinstance(value, list) and dict in map(type, value):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        if key == "_schedulers" or not str(key).startswith("_"):
            yield from _options(f"{name}.{key}", each)
    if not isinstance(value, dict):
        yield name, value


@dataclass(frozen=True)
class Resumption:
    """A snapshot that a run resumes from, and the state to load.

    Attributes:
        path: The folder of the snapshot.
        run_id: The name of the run that wrote it.
        update: The update after which it was written.
        parent: The snapshot from which that run was resumed.
        accepted: The names of the fields of the recipe that differ.
        same_kernels: Whether this process has the kernels of the snapshot.
        same_run: Whether the run continues in the folder of the snapshot, under the same name.
        updater: The state for the updater; empty once a trainer has loaded it.
        surroundings: The state for the trainer; None if the snapshot was saved without one, or once it is loaded.
    """

    path: Path
    run_id: str
    update: int
    parent: Parent | None
    accepted: tuple[str, ...]
    same_kernels: bool
    same_run: bool
    updater: dict[str, Any] = field(repr=False)
    surroundings: dict[str, Any] | None = field(repr=False)

    @property
    def source(self) -> Parent:
        """The snapshot, as snapshots of a run that continues from it name it."""
        return Parent(self.run_id, self.update)


def check_recipe(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any], accept: Collection[str]) -> list[Change]:
    """Check that a run has the recipe of a snapshot, except for fields that may differ.

    Names of code, and options that only one version of an optimizer has, cause a warning instead of an error.

    Args:
        path: The folder of the snapshot.
        saved: The recipe of the snapshot.
        own: The recipe of this run.
        accept: The names of fields that may differ.

    Returns:
        The fields that differ and are accepted.

    Raises:
        StateError: If other fields differ. The message lists them with both values.
        TypeError: If `accept` is no collection.
        ValueError: If `accept` names something that is no field of either recipe.
    """
    check_instance("accept", accept, Collection, "a collection of fields of the recipe", "Pass ('num_shards',) or so.")
    unknown = [accept] if isinstance(accept, str) else sorted(set(accept) - saved.keys() - own.keys())
    if unknown:
        remedy = f" Pass ({accept!r},)." if isinstance(accept, str) else did_you_mean(unknown, own.keys())
        what = f"`accept` must be a collection of fields of the recipe, got {', '.join(map(repr, unknown))}.{remedy}"
        raise ValueError(f"{what} Fields: {', '.join(name for name in own if '.model.' not in f'.{name}')}.")
    # Snapshots of older versions lack the order.
    changes = [each for each in compare_fields(saved, own) if not (_is_order(each.name) and each.saved is MISSING)]
    accept = {name for name in accept if not _is_shape(name)}
    refused = [each for each in changes if each.name not in accept and not _is_minor(each)]
    if refused:
        if any(_is_shape(each.name) for each in refused):
            raise StateError(
                f"Cannot resume from {path}: the model or what its optimizer trains differs. {_listed(refused)}. "
                "Restore it, and give an optimizer its parameters in the order of model.parameters(), not of a set. "
                "What the run has changed since, such as by add_param_group, change after creating the updater. "
                "`accept` cannot help, because the weights do not fit. To start a new run from those that do, load "
                "what `lockstep export` writes by model.load_state_dict(..., strict=False), in another folder."
            )
        names = ", ".join(repr(each.name) for each in refused[:LISTED]) + ("," if len(refused) == 1 else "")
        raise StateError(
            f"Cannot resume from {path}: the result depends on fields that differ. {_listed(refused)}. Restore them, "
            f"or continue with the values of this run by accept=({names})."
        )
    _warn([each for each in changes if each.name not in accept], f"Resuming from {path}, although ", ".")
    return [each for each in changes if each.name in accept]


def _is_shape(name: str) -> bool:
    """Return whether a field says which weights there are, without which a state cannot be loaded."""
    return name.endswith("num_parameters") or _is_order(name) or ".model." in f".{name}"


def _is_order(name: str) -> bool:
    """Return whether a field says which parameters an optimizer trains, and in which order."""
    return name.endswith("order_of_parameters")


def _warn(changes: list[Change], before: str, after: str) -> None:
    if changes:
        warn(f"{before}{_listed(changes)}{after}", DeterminismWarning)


def compare_fields(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """List the fields that differ, in the order of the snapshot; fields without a shape yet equal any shape.

    >>> compare_fields({"batch_size": 32, "seed": 0}, {"seed": 0, "accumulate": 2})
    [Change(name='batch_size', saved=32, own='nothing'), Change(name='accumulate', saved='nothing', own=2)]
    """
    pairs = [Change(name, saved.get(name, MISSING), own.get(name, MISSING)) for name in {**saved, **own}]
    return [each for each in pairs if each.saved != each.own and UNKNOWN_SHAPE not in (each.saved, each.own)]


def _is_minor(change: Change) -> bool:
    """Return whether a difference alone need not change the result."""
    if change.name.startswith(CODE):
        return True
    is_option = ".optimizer." in f".{change.name}" and change.name.rpartition(".")[2] != "num_parameters"
    return is_option and MISSING in (change.saved, change.own)


def _listed(changes: list[Change]) -> str:
    more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    return "; ".join(map(str, changes[:LISTED])) + more


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Name the snapshot in errors about a state that is not of the kind that its reader expects.

    A snapshot holds trees, which may have any form. What loads them changes nothing before it has read all of them.

    Args:
        path: The folder of the snapshot.

    Raises:
        StateError: If Python or PyTorch raises an error meanwhile; errors of this library stay as they are.
    """
    try:
        yield
    except LockstepError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"The state in {path} must fit this run, but reading it ends in {type(error).__name__}: "
            f"{printable(str(error))}. Nothing has been changed. Use the code that wrote the snapshot, with what it "
            "had changed by then, such as parameter groups that were added or modules that were pruned; or another one."
        ) from error


def prepare(
    updater: Updater, snapshot: Snapshot, accept: Collection[str] = (), *, same_run: bool = False
) -> Resumption:
    """Check that a snapshot fits an updater, and return the state to load. Nothing of the updater changes.

    Args:
        updater: The updater that is to continue.
        snapshot: The snapshot.
        accept: The names of fields of the recipe that may differ. The run continues with its own values of them.
        same_run: Whether the run continues in the folder of the snapshot.

    Raises:
        StateError: If other fields differ.
        ValueError: If `accept` names something that is no field.
    """
    changes = check_recipe(snapshot.path, snapshot.recipe, updater.recipe_fields(), accept)
    with fitting(snapshot.path):
        state = _state_of(snapshot, updater, changes)
    program = compare_fields(read_program(snapshot.path), describe_program())
    _warn(
        # A package that only one of them had imported is no difference, because a program imports some of them late.
        [each for each in program if MISSING not in (each.saved, each.own)],
        f"Resuming from {snapshot.path} with other code: ",
        ". The run continues, but its result need not be that of an uninterrupted run.",
    )
    kernels = compare_fields(snapshot.manifest.kernel_class, kernel_class(updater.devices))
    _warn(
        kernels,
        f"Resuming from {snapshot.path} with kernels that may round differently: ",
        ". The determinism guarantee is suspended: the result need not be that of an uninterrupted run.",
    )
    return Resumption(
        path=snapshot.path,
        run_id=snapshot.manifest.run_id,
        update=snapshot.update,
        parent=snapshot.manifest.parent,
        accepted=tuple(each.name for each in changes),
        same_run=same_run,
        same_kernels=not kernels,
        updater=state,
        surroundings=snapshot.surroundings(),
    )


def _state_of(snapshot: Snapshot, updater: Updater, accepted: list[Change]) -> dict[str, Any]:
    """Return the state of a snapshot as `Updater.load_state_dict` reads it.

    Args:
        snapshot: The snapshot.
        updater: The updater that is to load it. It is not changed.
        accepted: Fields of the recipe for which the updater keeps its own values.

    Raises:
        StateError: If the state is that of another update than the snapshot.
    """
    state: dict[str, Any] = snapshot.state()
    counts = {"iteration": snapshot.update, "applied_updates": snapshot.manifest.progress.get("applied")}
    for name, count in counts.items():
        if name in state and (type(state[name]) is not int or state[name] != count):
            raise StateError(f"`{name}` in the state of {snapshot.path} must be {count!r}, got {state[name]!r}.")
    metadata = state.pop("metadata")
    models = updater.get_all_models()
    if "models" in state:
        saved = snapshot.models()
        for name, others in state["models"].items():
            usual = {path: dict(USUAL_METADATA) for path, _ in models[name].named_modules()} if name in models else {}
            restored = state["models"][name] = OrderedDict({**saved[name], **others})
            # Where PyTorch reads the versions of modules.
            restored._metadata = OrderedDict({**usual, **metadata[name]})  # type: ignore[attr-defined]  # noqa: SLF001
    optimizers = updater.get_all_optimizers()
    for name, each in state.get("optimizers", {}).items():
        if name in optimizers:
            _prepare(each.get("optimizer", each), optimizers[name])
    if accepted:
        _keep_own(state, updater, {each.name: each for each in accepted})
    return state


def _prepare(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Adapt the saved state of an optimizer to this process: memory layouts, and options that are new."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A `state_dict` of the optimizer's own class may have other entries, which its `load_state_dict` takes as they are.
    for index, values in saved.get("state", {}).items():
        # A parameter without a shape gets the one that is saved, in row-major order like its state. What belongs to no
        # parameter has a name instead of an index.
        shaped = index in range(len(parameters)) and not is_lazy(parameters[index])
        for key, value in values.items() if shaped else ():
            # Files hold tensors in row-major order, but fused kernels ignore strides.
            if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                values[key] = laid_out_for(parameters[index], value)
    if len(saved.get("param_groups", ())) != len(optimizer.param_groups):
        return
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        # Options of another version of PyTorch, of which `check_recipe` has warned.
        group |= {option: own[option] for option in own.keys() - group.keys()}


def _keep_own(state: dict[str, Any], updater: Updater, accepted: Mapping[str, Change]) -> None:
    """Replace saved values by those of this run, where fields of the recipe were accepted."""
    own: dict[str, Any] = updater.live_state()
    state |= {name: accepted[name].own for name in ("num_shards", "seed") if name in accepted}
    if "loss_scale" in {name.partition(".")[0] for name in accepted}:
        state["loss_scale"] = own["loss_scale"]
    for name in {*state.get("frozen", {}), *own.get("frozen", {})}:
        if _named(name, "frozen") in accepted:
            state.setdefault("frozen", {})[name] = own.get("frozen", {}).get(name, [])
    for name, iterator in state.get("iterators", {}).items():
        if _named(name, "data_seed") in accepted:
            iterator["seed"] = accepted[_named(name, "data_seed")].own
    for name, optimizer in state.get("optimizers", {}).items():
        groups = optimizer.get("optimizer", optimizer)["param_groups"]
        _keep_own_options(groups, updater.get_optimizer(name), _named(name, "optimizer."), accepted)
    for name, scheduler in state.get("schedulers", {}).items():
        start, kept = _named(name, "scheduler"), own["schedulers"][name]
        scheduler.update({key: kept[key] for key in scheduler if f"{start}.{key}" in accepted})
        rates = (each for each in accepted if each.startswith(_named(name, "optimizer.")) and each.endswith(".lr"))
        if any(each.startswith(start) for each in accepted) or any(rates):
            optimizer = state["optimizers"][name]
            saved = optimizer.get("optimizer", optimizer)["param_groups"]
            made = updater.get_all_schedulers()[name]
            state["schedulers"][name] = _scheduled(made, scheduler, updater.get_optimizer(name).param_groups, saved)


def _scheduled(
    made: LRScheduler, saved: dict[str, Any], groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the state of a scheduler of this run after as many steps as a saved one has made.

    Args:
        made: The scheduler, which is left as it is.
        saved: The state of the saved one, returned where values come from what was measured, or no step is missing.
        groups: The parameter groups that the scheduler changes; they are left as they are.
        saved_groups: The saved ones, which receive what the schedule sets.
    """
    before, options = deepcopy(made.state_dict()), [dict(each) for each in groups]
    steps = saved.get("last_epoch", 0) - before.get("last_epoch", 0)
    if isinstance(made, ReduceLROnPlateau) or steps <= 0:
        return saved
    try:
        with warnings.catch_warnings():
            # The scheduler steps without its optimizer.
            warnings.simplefilter("ignore")
            for _ in range(steps):
                made.step()
        for group, now, first in zip(saved_groups, groups, options, strict=True):
            group |= {key: deepcopy(now[key]) for key in now if key != "params" and now[key] != first[key]}
        return deepcopy(made.state_dict())
    finally:
        for group, first in zip(groups, options, strict=True):
            group.update(first)
        made.load_state_dict(before)


def _keep_own_options(
    groups: list[dict[str, Any]], optimizer: Optimizer, prefix: str, accepted: Mapping[str, Change]
) -> None:
    """Replace saved options of an optimizer by its own where they were accepted."""
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        start = f"{prefix}{index}." if len(groups) > 1 else prefix
        for option in [each for each in group if f"{start}{each}" in accepted]:
            change = accepted[f"{start}{option}"]
            # A value that a schedule has moved since stays where the schedule is.
            if change.own != MISSING and _is_initial(group[option], change.saved):
                group[option] = own[option]


def _named(name: str, field: str) -> str:
    return field if name == MAIN else f"{name}.{field}"


def _is_initial(value: Any, saved: Any) -> bool:
    """Return whether an option still has the value with which the run was set up."""
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return bool((list(plain) if isinstance(plain, tuple) else plain) == saved)
