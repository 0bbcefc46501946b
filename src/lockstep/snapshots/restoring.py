"""Compare the recipe of a snapshot with that of an updater, and load its state into it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.errors import DeterminismWarning, LockstepError, StateError, printable
from lockstep.snapshots.collect import USUAL_METADATA
from lockstep.snapshots.snapshot import Snapshot
from lockstep.strides import laid_out_for
from lockstep.updaters import CODE, MAIN, UNKNOWN_SHAPE, Updater

MISSING: Final = "nothing"
"""The value that a message shows for a field that one side does not have."""

LISTED: Final = 20
"""The number of fields that a message lists with their values. All of them are attributes of the error."""


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
        return f"{printable(self.name)} is {self.own!r} here and {self.saved!r} in the snapshot"


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
        ValueError: If `accept` names something that is no field of either recipe.
    """
    unknown = sorted(set(accept) - saved.keys() - own.keys())
    if isinstance(accept, str) or unknown:
        listed = ", ".join(name for name in own if ".model." not in f".{name}")
        given = f"the text {accept!r}. Pass ({accept!r},)" if isinstance(accept, str) else f"{accept!r}"
        raise ValueError(f"`accept` must be a collection of fields of the recipe, got {given}. Fields: {listed}.")
    changes = compare_fields(saved, own)
    accept = {name for name in accept if not _is_shape(name)}
    refused = [each for each in changes if each.name not in accept and not _is_minor(each)]
    if refused:
        if any(_is_shape(each.name) for each in refused):
            raise StateError(
                f"Cannot resume from {path}: the model or what its optimizer trains differs. {_listed(refused)}. "
                "Restore it. `accept` cannot help, because the weights do not fit. To start a new run from those that "
                "do, load what `lockstep export` writes by model.load_state_dict(..., strict=False), in another folder."
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
    return name.endswith("num_parameters") or ".model." in f".{name}"


def check_kernels(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Compare the kernel class of a run with that of a snapshot, and warn if they differ.

    Args:
        path: The folder of the snapshot.
        saved: The kernel class of the snapshot.
        own: The kernel class of this run.

    Returns:
        Whether they are equal.
    """
    changes = compare_fields(saved, own)
    _warn(
        changes,
        f"Resuming from {path} with kernels that may round differently: ",
        ". The determinism guarantee is suspended: the result need not be that of an uninterrupted run.",
    )
    return not changes


def check_program(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compare the program of a run with the one that wrote a snapshot, and warn if they differ.

    A package that only one of them had imported is no difference, because a program imports some of them late.

    Args:
        path: The folder of the snapshot.
        saved: The description of the program that wrote it.
        own: The description of this program.
    """
    changes = [each for each in compare_fields(saved, own) if MISSING not in (each.saved, each.own)]
    consequence = ". The run continues, but its result need not be that of an uninterrupted run."
    _warn(changes, f"Resuming from {path} with other code: ", consequence)


def _warn(changes: list[Change], before: str, after: str) -> None:
    if changes:
        warnings.warn(f"{before}{_listed(changes)}{after}", DeterminismWarning, stacklevel=3)


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
            f"{printable(str(error))}. Nothing has been changed. Use the code that wrote the snapshot, or another one."
        ) from error


def updater_state(snapshot: Snapshot, updater: Updater, accepted: list[Change]) -> dict[str, Any]:
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
    for index, values in saved["state"].items():
        # A parameter without a shape gets the one that is saved, in row-major order like its state.
        shaped = index < len(parameters) and not is_lazy(parameters[index])
        for key, value in values.items() if shaped else ():
            # Files hold tensors in row-major order, but fused kernels ignore strides.
            if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                values[key] = laid_out_for(parameters[index], value)
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        return
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        # Options of another version of PyTorch, of which `check_recipe` has warned.
        for option in own.keys() - group.keys():
            group[option] = own[option]


def _keep_own(state: dict[str, Any], updater: Updater, accepted: Mapping[str, Change]) -> None:
    """Replace saved values by those of this run, where fields of the recipe were accepted."""
    own: dict[str, Any] = updater.live_state()
    for field in ("num_shards", "seed"):
        if field in accepted:
            state[field] = accepted[field].own
    if "loss_scale" in {field.partition(".")[0] for field in accepted}:
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
        kept = own["schedulers"][name]
        scheduler.update({key: kept[key] for key in scheduler if _named(name, f"scheduler.{key}") in accepted})


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
