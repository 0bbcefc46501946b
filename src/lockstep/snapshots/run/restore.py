"""Load the state of a snapshot into an updater."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.snapshots.reading import Snapshot
from lockstep.snapshots.run.collect import USUAL_METADATA
from lockstep.snapshots.run.recipe import MISSING, Change
from lockstep.strides import laid_out_for
from lockstep.updaters import MAIN, Updater


def updater_state(snapshot: Snapshot, updater: Updater, accepted: list[Change]) -> dict[str, Any]:
    """Return the state of a snapshot as `Updater.load_state_dict` reads it.

    Args:
        snapshot: The snapshot.
        updater: The updater that is to load it. It is not changed.
        accepted: Fields of the recipe for which the updater keeps its own values.
    """
    state: dict[str, Any] = snapshot.state()
    metadata = state.pop("metadata")
    models = updater.get_all_models()
    if "models" in state:
        saved = snapshot.models()
        for name, others in state["models"].items():
            usual = {path: dict(USUAL_METADATA) for path, _ in models[name].named_modules()} if name in models else {}
            state["models"][name] = _with_metadata({**saved[name], **others}, {**usual, **metadata[name]})
    optimizers = updater.get_all_optimizers()
    for name, each in state.get("optimizers", {}).items():
        if name in optimizers:
            _prepare(each.get("optimizer", each), optimizers[name])
    _keep_own(state, updater, {each.name: each for each in accepted})
    return state


def _with_metadata(values: dict[str, Any], metadata: dict[str, Any]) -> OrderedDict[str, Any]:
    """Return a state of a model with the versions of its modules where PyTorch reads them."""
    state = OrderedDict(values)
    state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]  # noqa: SLF001
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
    if not accepted:
        return
    own: dict[str, Any] = updater.live_state()
    for field in ("num_shards", "seed"):
        if field in accepted:
            state[field] = accepted[field].own
    if "loss_scale" in {field.partition(".")[0] for field in accepted}:
        state["loss_scale"] = own["loss_scale"]
    _keep_own_frozen(state, own, accepted)
    for name, iterator in state.get("iterators", {}).items():
        if _named(name, "data_seed") in accepted:
            iterator["seed"] = accepted[_named(name, "data_seed")].own
    for name, optimizer in state.get("optimizers", {}).items():
        groups = optimizer.get("optimizer", optimizer)["param_groups"]
        _keep_own_options(groups, updater.get_optimizer(name), _named(name, "optimizer."), accepted)
    for kind in ("scheduler", "epoch_scheduler"):
        for name, scheduler in state.get(f"{kind}s", {}).items():
            kept = own[f"{kind}s"][name]
            scheduler.update({key: kept[key] for key in scheduler if _named(name, f"{kind}.{key}") in accepted})


def _keep_own_frozen(state: dict[str, Any], own: Mapping[str, Any], accepted: Mapping[str, Change]) -> None:
    """Replace the saved names of frozen parameters by this run's own for the models where they were accepted."""
    kept: dict[str, list[str]] = own.get("frozen", {})
    for name in {*state.get("frozen", {}), *kept}:
        if _named(name, "frozen") in accepted:
            state.setdefault("frozen", {})[name] = kept.get(name, [])


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
