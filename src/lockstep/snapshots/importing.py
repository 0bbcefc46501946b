"""Load checkpoints of plain PyTorch training, Lightning and Accelerate into an updater.

You load the files, because they are pickles: ``torch.load(path, weights_only=True)``. These functions take what was in
them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lockstep.errors import StateError, printable
from lockstep.updaters import MAIN, Updater

WRAPPERS: Final = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrappers of modules add to names, at any place."""
LISTED: Final = 20
"""The number of names of a kind that a table lists."""


@dataclass
class Matches:
    """What of a checkpoint was loaded, and what was not; printed as a table.

    Attributes:
        loaded: The names that were loaded, with the name in the checkpoint.
        missing: The names of the updater for which the checkpoint has nothing; they keep their values.
        unknown: The names of the checkpoint for which the updater has nothing.
        unfit: What has another shape, dtype or number of values, with both.
        notes: What a checkpoint of this kind cannot contain.
    """

    loaded: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything was matched."""
        return not (self.missing or self.unknown or self.unfit)

    def __str__(self) -> str:
        renamed = [f"{own} <- {theirs}" for own, theirs in self.loaded.items() if own != theirs]
        groups = [
            (f"loaded ({len(self.loaded)})", renamed or ["all under their own names"] if self.loaded else []),
            (f"missing ({len(self.missing)})", self.missing),
            (f"unknown ({len(self.unknown)})", self.unknown),
            (f"unfit ({len(self.unfit)})", [f"{name}: {why}" for name, why in self.unfit.items()]),
            ("not in such a checkpoint", self.notes),
        ]
        return "\n".join(line for title, entries in groups for line in _rows(title, entries))


def _rows(title: str, entries: Sequence[str]) -> list[str]:
    listed = list(entries[:LISTED])
    if len(entries) > LISTED:
        listed.append(f"and {len(entries) - LISTED} more")
    # The names are those of a file.
    return [f"{title if row == 0 else '':<26}{printable(entry)}" for row, entry in enumerate(listed or ["none"])]


def bare(name: str) -> str:
    """Return a name without what wrappers of modules have added.

    >>> bare("module._orig_mod.layer._checkpoint_wrapped_module.weight")
    'layer.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def match_tensors(own: Mapping[str, Any], theirs: Mapping[str, Any], found: Matches) -> dict[str, Any]:
    """Return a state dict of a model with the values of a checkpoint where they fit.

    Args:
        own: The state dict of the model.
        theirs: The state dict of the checkpoint.
        found: The matches, which are extended.
    """
    # A model may itself have a part with the name of a wrapper, so exact names come first.
    by_name = {name if name in own else bare(name): name for name in theirs}
    result = dict(own)
    for name, value in own.items():
        if name not in by_name:
            found.missing.append(name)
            continue
        given = theirs[by_name[name]]
        if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            if given.shape != value.shape:
                found.unfit[name] = f"shape {list(given.shape)} instead of {list(value.shape)}"
                continue
            if given.dtype != value.dtype:
                found.unfit[name] = f"{given.dtype} instead of {value.dtype}"
                continue
        result[name] = given
        found.loaded[name] = by_name[name]
    found.unknown += [by_name[name] for name in by_name if name not in own]
    return result


KEYS: Final = {
    "model": ("model", "state_dict", "model_state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optim"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler"),
}
"""The names under which plain training loops save their parts."""
NOTE: Final = "the position in the data, random numbers, and gradients that were accumulated: the data starts anew"


def import_torch(updater: Updater, checkpoint: Mapping[str, Any], *, partial: bool = False) -> Matches:
    """Load a checkpoint of a plain training loop, and print what matched.

    Args:
        updater: An updater with one model and one optimizer. After an error it is unchanged.
        checkpoint: A dict with the state dicts of the model (``model``, ``state_dict`` or ``model_state_dict``), and if
            it has them, of the optimizer, the scheduler and a `torch.amp.GradScaler`; or the state dict of a model.
        partial: Whether to load what matches if something does not. By default that is an error.

    Returns:
        What matched.

    Raises:
        StateError: If something does not match and `partial` is false, or if an optimizer refuses its state.
    """
    parts = {part: next((checkpoint[key] for key in keys if key in checkpoint), None) for part, keys in KEYS.items()}
    if parts["model"] is None and all(isinstance(each, torch.Tensor) for each in checkpoint.values()):
        parts["model"] = checkpoint
    return _load(updater, parts, partial=partial)


def import_lightning(
    updater: Updater, checkpoint: Mapping[str, Any], *, prefix: str = "model.", partial: bool = False
) -> Matches:
    """Load a checkpoint of Lightning, and print what matched.

    Args:
        updater: An updater with one model and one optimizer. After an error it is unchanged.
        checkpoint: The dict of the checkpoint, of which the first optimizer and the first scheduler are used.
        prefix: The attribute of the LightningModule that holds the model, with a dot. Names without it are unknown.
        partial: Whether to load what matches if something does not. By default that is an error.

    Returns:
        What matched.

    Raises:
        StateError: As `import_torch`.
    """
    saved = checkpoint.get("state_dict")
    named = {name: value for name, value in (saved or {}).items() if name.startswith(prefix)}
    model = None if saved is None else {name.removeprefix(prefix): value for name, value in named.items()}
    parts = {
        "model": model,
        "optimizer": next(iter(checkpoint.get("optimizer_states", [])), None),
        "scheduler": next(iter(checkpoint.get("lr_schedulers", [])), None),
        # Under the class name of a plugin for precision.
        "scaler": next((each for each in checkpoint.values() if _is_scaler(each)), None),
    }
    # Not among those of the model, where they could stand for a tensor of the same name.
    others = [name for name in saved or {} if name not in named]
    return _load(updater, parts, partial=partial, unknown=others)


def import_accelerate(
    updater: Updater,
    *,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    scaler: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> Matches:
    """Load what ``Accelerator.save_state`` has written, and print what matched.

    Args:
        updater: An updater with one model and one optimizer. After an error it is unchanged.
        model: The content of ``model.safetensors``.
        optimizer: The content of ``optimizer.bin``.
        scheduler: The content of ``scheduler.bin``.
        scaler: The content of ``scaler.pt``.
        partial: Whether to load what matches if something does not. By default that is an error.

    Returns:
        What matched.

    Raises:
        StateError: As `import_torch`.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return _load(updater, parts, partial=partial)


def _load(updater: Updater, parts: Mapping[str, Any], *, partial: bool, unknown: Sequence[str] = ()) -> Matches:
    """Load the parts of a checkpoint into an updater, and print what matched."""
    state: dict[str, Any] = updater.state_dict()
    found = Matches(unknown=list(unknown), notes=[NOTE])
    if set(state["models"]) != {MAIN} or set(state["optimizers"]) - {MAIN}:
        raise StateError(
            f"`updater` must have one model and one optimizer, each named {MAIN!r}, to load a foreign checkpoint, got "
            f"the models {list(state['models'])} and the optimizers {list(state['optimizers'])}."
        )
    state["models"][MAIN] = _model(updater, state["models"][MAIN], parts["model"], found)
    if parts["optimizer"] is not None:
        _optimizer(updater, state, parts["optimizer"], found)
    else:
        found.missing.append("optimizer")
    _scheduler(state, parts["scheduler"], found)
    _scaler(state, parts["scaler"], found)
    if updater.communicator.rank == 0:
        sys.stdout.write(f"{found}\n")
    if not (found.complete or partial):
        raise StateError(
            f"The checkpoint does not fit the updater, of which nothing has changed:\n{found}\nPass `partial=True` to "
            "load what matches."
        )
    updater.load_state_dict(state)
    return found


def _model(updater: Updater, own: Mapping[str, Any], theirs: Mapping[str, Any] | None, found: Matches) -> Any:
    if theirs is None:
        found.missing.append("model")
        return own
    model = updater.get_all_models()[MAIN]
    given = dict(theirs)
    tied: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
    # Files of safetensors have tied weights under one of their names.
    for names in tied.values():
        there = next((name for name in names if name in given), None)
        if there is not None:
            given.update({name: given[there] for name in names if name not in given})
    merged = match_tensors(own, given, found)
    result = own.copy()  # type: ignore[attr-defined]  # an OrderedDict with the versions of the modules
    result.update(merged)
    return result


def _optimizer(updater: Updater, state: dict[str, Any], theirs: Mapping[str, Any], found: Matches) -> None:
    """Replace the state of the optimizer."""
    holder = state["optimizers"][MAIN]
    own = holder.get("optimizer", holder)
    if not {"state", "param_groups"} <= theirs.keys():
        found.unfit["optimizer"] = "no state dict of a torch.optim.Optimizer"
        return
    sizes = [[len(group["params"]) for group in each["param_groups"]] for each in (theirs, own)]
    if sizes[0] != sizes[1]:
        found.unfit["optimizer"] = f"groups of {sizes[0]} parameters instead of {sizes[1]}"
        return
    replaced = {"state": dict(theirs["state"]), "param_groups": _groups(theirs["param_groups"], own["param_groups"])}
    found.loaded["optimizer"] = "optimizer"
    for group, before in zip(theirs["param_groups"], own["param_groups"], strict=True):
        found.missing += [f"optimizer.{option}" for option in before.keys() - group.keys()]
    if "optimizer" in holder:
        holder["optimizer"] = replaced
        found.notes.append("master weights: they start from the weights of the model")
        holder["masters"] = _masters(updater, state, holder["masters"])
    else:
        state["optimizers"][MAIN] = replaced


def _groups(theirs: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a checkpoint, completed by options that it lacks."""
    return [{**before, **group, "params": before["params"]} for group, before in zip(theirs, own, strict=True)]


def _masters(updater: Updater, state: Mapping[str, Any], masters: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    """Return master weights that equal the weights of the state, by the index of the parameter in the optimizer."""
    names = {id(each): name for name, each in updater.get_all_models()[MAIN].named_parameters()}
    groups = updater.get_optimizer(MAIN).param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    weights = state["models"][MAIN]
    return {index: weights[names[id(parameters[index])]].to(master.dtype) for index, master in masters.items()}


def _scheduler(state: dict[str, Any], theirs: Mapping[str, Any] | None, found: Matches) -> None:
    if MAIN in state["schedulers"]:
        own = state["schedulers"][MAIN]
        if theirs is None:
            found.missing.append("scheduler")
            return
        found.missing += [f"scheduler.{name}" for name in own.keys() - theirs.keys()]
        found.unknown += [f"scheduler.{name}" for name in theirs.keys() - own.keys()]
        state["schedulers"][MAIN] = {**own, **{name: value for name, value in theirs.items() if name in own}}
        found.loaded["scheduler"] = "scheduler"
        return
    if theirs is not None:
        found.unknown.append("scheduler")


def _scaler(state: dict[str, Any], theirs: Mapping[str, Any] | None, found: Matches) -> None:
    own = state["loss_scale"]
    moves = {"growth", "backoff", "interval", "finite_updates"} <= own.keys()
    if not theirs:
        found.missing += ["scaler"] if moves else []
        return
    if not moves or not _is_scaler(theirs):
        found.unknown.append("scaler")
        return
    own.update(
        factor=float(theirs["scale"]),
        growth=theirs["growth_factor"],
        backoff=theirs["backoff_factor"],
        interval=theirs["growth_interval"],
        finite_updates=theirs["_growth_tracker"],
    )
    found.loaded["scaler"] = "scaler"


def _is_scaler(value: Any) -> bool:
    return isinstance(value, Mapping) and {"scale", "growth_factor", "_growth_tracker"} <= value.keys()
