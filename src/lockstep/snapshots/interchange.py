"""Write snapshots for other programs, and load checkpoints of plain PyTorch training, Lightning and Accelerate.

You load the files of checkpoints, because they are pickles: ``torch.load(path, weights_only=True)``. The functions that
import take what was in them.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.arguments import look_up
from lockstep.errors import SnapshotError, StateError, printable
from lockstep.snapshots.content import model_file
from lockstep.snapshots.snapshot import Snapshot, load_from
from lockstep.snapshots.updater_state import LISTED, fitting
from lockstep.updaters import MAIN, Updater

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
SCALER: Final = {
    "factor": "scale",
    "growth": "growth_factor",
    "backoff": "backoff_factor",
    "interval": "growth_interval",
    "finite_updates": "_growth_tracker",
}
"""What a loss scale that moves has in its state, with the names in that of a `torch.amp.GradScaler`."""
WRAPPERS: Final = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrappers of modules add to names, at any place."""


def export_torch(source: str | Path, path: str | Path) -> dict[str, Any]:
    """Write a snapshot as a checkpoint that a plain training loop loads with ``torch.load(path, weights_only=True)``.

    The checkpoint is a dict with the state dicts ``model``, ``optimizer``, and, where the run has them, ``scheduler``
    and ``scaler`` (that of a `torch.amp.GradScaler`), and with the numbers ``epoch`` and
    ``iteration``. If there are several models, optimizers or schedulers, each entry is a dict of state dicts by name.
    ``master_weights`` has the float32 weights of an optimizer whose model is held in half precision.

    Args:
        source: The folder of a snapshot, or of a run, of which the newest whole snapshot is used.
        path: The file to write, which must not exist.

    Returns:
        The checkpoint.

    Raises:
        FileExistsError: If the file exists.
        SnapshotError: If there is no whole snapshot.

    Determinism: with one shard per batch and no accumulation, the same updates in bare PyTorch, on the same batches and
    with the same random numbers, have the bits of the run.
    """
    if Path(path).exists():
        raise FileExistsError(f"`path` must not exist, got {path}. Choose another path, or remove it.")
    snapshot = _read(source)
    with fitting(snapshot.path):
        checkpoint = _checkpoint(snapshot)
    # "x" refuses a file that exists, at the same moment as it creates the new one.
    with Path(path).open("xb") as file:
        torch.save(checkpoint, file)
    return checkpoint


def export_hf(source: str | Path, path: str | Path, *, config: Any = None, model: str = MAIN) -> Path:
    """Write the weights of a snapshot into a folder that ``from_pretrained`` of transformers reads.

    Args:
        source: The folder of a snapshot, or of a run, of which the newest whole snapshot is used.
        path: The folder to write, which must not have a ``model.safetensors``.
        config: The configuration of the model: an object with ``save_pretrained``, such as a model of transformers or
            its ``config``; or the path of a ``config.json`` or of its folder. With None only the weights are written.
        model: The name of the model.

    Returns:
        The file of the weights.

    Raises:
        FileExistsError: If there are weights in the folder.
        FileNotFoundError: If there is no configuration at the path.
        KeyError: If the snapshot has no model of this name.
        SnapshotError: If there is no whole snapshot.
    """
    snapshot = _read(source)
    look_up(model, snapshot.manifest.models, "model")
    folder = Path(path)
    target = folder / WEIGHTS
    if target.exists():
        raise FileExistsError(f"`path` must not hold weights already, got {target}. Choose another path, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        _write_config(config, folder)
    # The file of a snapshot is what transformers reads: bare names, tied weights once, and its mark in the header.
    shutil.copyfile(snapshot.path / model_file(model), target)
    return target


def _write_config(config: Any, folder: Path) -> None:
    """Write the configuration of a model, but not its weights."""
    if isinstance(config, str | Path):
        given = Path(config)
        shutil.copyfile(given / CONFIG if given.is_dir() else given, folder / CONFIG)
        return
    # A model has its configuration; its own `save_pretrained` would also write the weights that it has now.
    config = getattr(config, "config", config)
    if not hasattr(config, "save_pretrained"):
        raise TypeError(f"`config` must have `save_pretrained` or be a path, got a {type(config).__name__}.")
    config.save_pretrained(folder)


def _read(source: str | Path) -> Snapshot:
    snapshot = load_from(source)
    if snapshot is None:
        raise SnapshotError(f"`source` must be the folder of a run with snapshots, or of a snapshot, got {source}.")
    return snapshot


def _checkpoint(snapshot: Snapshot) -> dict[str, Any]:
    """Return the checkpoint of a plain training loop."""
    state: dict[str, Any] = snapshot.state()
    models = {name: {**tensors, **state["models"].get(name, {})} for name, tensors in snapshot.models().items()}
    saved, scale = state.get("optimizers", {}), state.get("loss_scale", {})
    found = {
        "model": _single(models),
        "optimizer": _single({name: each.get("optimizer", each) for name, each in saved.items()}),
        "master_weights": _single({name: each["masters"] for name, each in saved.items() if "masters" in each}),
        "scheduler": _single(state.get("schedulers", {})),
        "scaler": {theirs: scale[own] for own, theirs in SCALER.items()} if SCALER.keys() <= scale.keys() else {},
    }
    checkpoint = {name: each for name, each in found.items() if each}
    return {**checkpoint, "epoch": snapshot.epoch, "iteration": snapshot.update}


def _single(named: Mapping[str, Any]) -> Any:
    return named[MAIN] if set(named) == {MAIN} else dict(named)


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


def match_tensors(own: dict[str, Any], theirs: Mapping[str, Any], found: Matches) -> dict[str, Any]:
    """Return a state dict of a model with the values of a checkpoint where they fit.

    Args:
        own: The state dict of the model.
        theirs: The state dict of the checkpoint.
        found: The matches, which are extended.
    """
    # A model may itself have a part with the name of a wrapper, so exact names come first.
    by_name = {name if name in own else bare(name): name for name in theirs}
    # With the versions of the modules, which the state dict of a model has as an attribute.
    result = copy.copy(own)
    for name, value in own.items():
        if name not in by_name:
            found.missing.append(name)
            continue
        given = theirs[by_name[name]]
        are_tensors = isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor)
        if are_tensors and given.shape != value.shape:
            found.unfit[name] = f"shape {list(given.shape)} instead of {list(value.shape)}"
        elif are_tensors and given.dtype != value.dtype:
            found.unfit[name] = f"{given.dtype} instead of {value.dtype}"
        else:
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
    lacking = {"scheduler": MAIN not in state["schedulers"], "scaler": not SCALER.keys() <= state["loss_scale"].keys()}
    for part, load in LOADERS.items():
        # That of a scaler that is switched off is empty.
        theirs = parts[part] if part != "scaler" else parts[part] or None
        if theirs is not None and not lacking.get(part):
            load(updater, state, theirs, found)
        elif theirs is not None:
            found.unknown.append(part)
        elif not lacking.get(part):
            found.missing.append(part)
    if updater.communicator.rank == 0:
        sys.stdout.write(f"{found}\n")
    if not (found.complete or partial):
        raise StateError(
            f"The checkpoint does not fit the updater, of which nothing has changed:\n{found}\nPass `partial=True` to "
            "load what matches."
        )
    updater.load_state_dict(state)
    return found


def _model(updater: Updater, state: dict[str, Any], theirs: Mapping[str, Any], found: Matches) -> None:
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
    state["models"][MAIN] = match_tensors(state["models"][MAIN], given, found)


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
    pairs = list(zip(own["param_groups"], theirs["param_groups"], strict=True))
    groups = [{**before, **group, "params": before["params"]} for before, group in pairs]
    found.loaded["optimizer"] = "optimizer"
    found.missing += [f"optimizer.{option}" for before, group in pairs for option in before.keys() - group.keys()]
    own.clear()
    own.update(state=dict(theirs["state"]), param_groups=groups)
    if "masters" in holder:
        found.notes.append("master weights: they start from the weights of the model")
        holder["masters"] = _masters(updater, state, holder["masters"])


def _masters(updater: Updater, state: Mapping[str, Any], masters: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    """Return master weights that equal the weights of the state, by the index of the parameter in the optimizer."""
    names = {id(each): name for name, each in updater.get_all_models()[MAIN].named_parameters()}
    groups = updater.get_optimizer(MAIN).param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    weights = state["models"][MAIN]
    return {index: weights[names[id(parameters[index])]].to(master.dtype) for index, master in masters.items()}


def _scheduler(_: Updater, state: dict[str, Any], theirs: Mapping[str, Any], found: Matches) -> None:
    own = state["schedulers"][MAIN]
    found.missing += [f"scheduler.{name}" for name in own.keys() - theirs.keys()]
    found.unknown += [f"scheduler.{name}" for name in theirs.keys() - own.keys()]
    state["schedulers"][MAIN] = {**own, **{name: value for name, value in theirs.items() if name in own}}
    found.loaded["scheduler"] = "scheduler"


def _scaler(_: Updater, state: dict[str, Any], theirs: Mapping[str, Any], found: Matches) -> None:
    if not _is_scaler(theirs):
        found.unknown.append("scaler")
        return
    own = {name: theirs[each] for name, each in SCALER.items()}
    state["loss_scale"].update(own, factor=float(theirs["scale"]))
    found.loaded["scaler"] = "scaler"


LOADERS: Final = {"model": _model, "optimizer": _optimizer, "scheduler": _scheduler, "scaler": _scaler}
"""What loads each part of a checkpoint."""


def _is_scaler(value: Any) -> bool:
    return isinstance(value, Mapping) and {"scale", "growth_factor", "_growth_tracker"} <= value.keys()
